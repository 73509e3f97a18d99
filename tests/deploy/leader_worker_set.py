"""LeaderWorkerSets: a schema after their public API reference, and a workload for each.

The schema knows the fields of leaderworkerset.x-k8s.io/v1 and closes its objects, as the API server prunes
unknown ones silently. Pod templates are checked as Kubernetes' own.
"""

from functools import cache

import jsonschema
import kubernetes_validate

# Validation would parse a megabyte of schemas for each document.
kubernetes_validate.utils.schema_contents = cache(kubernetes_validate.utils.schema_contents)
LABELS = "leaderworkerset.sigs.k8s.io"
_NUMBER = {"type": "integer", "minimum": 0}
_ANY = {"type": "object"}
_PORTION = {"anyOf": [_NUMBER, {"type": "string", "pattern": "^[0-9]+%$"}]}


def _closed(required=(), **fields):
    return {"type": "object", "properties": fields, "required": list(required), "additionalProperties": False}


_ROLLING = _closed(partition=_NUMBER, maxUnavailable=_PORTION, maxSurge=_PORTION)
_TEMPLATE = _closed(
    ("workerTemplate",),
    leaderTemplate=_ANY,
    workerTemplate=_ANY,
    size={"type": "integer", "minimum": 1},
    restartPolicy={"enum": ["Default", "None", "RecreateGroupOnPodRestart", "RecreateGroupAfterStart"]},
    subGroupPolicy=_closed(
        subGroupPolicyType={"enum": ["LeaderWorker", "LeaderExcluded"]}, subGroupSize=_NUMBER
    ),
    volumeClaimTemplates={"type": "array"},
    persistentVolumeClaimRetentionPolicy=_ANY,
)
SCHEMA = _closed(
    ("apiVersion", "kind", "metadata", "spec"),
    apiVersion={"const": "leaderworkerset.x-k8s.io/v1"},
    kind={"const": "LeaderWorkerSet"},
    metadata=_ANY,
    spec=_closed(
        ("leaderWorkerTemplate",),
        replicas=_NUMBER,
        leaderWorkerTemplate=_TEMPLATE,
        rolloutStrategy=_closed(
            ("type",), type={"enum": ["RollingUpdate"]}, rollingUpdateConfiguration=_ROLLING
        ),
        startupPolicy={"enum": ["LeaderCreated", "LeaderReady"]},
        networkConfig=_closed(("subdomainPolicy",), subdomainPolicy={"enum": ["Shared", "UniquePerReplica"]}),
    ),
)


def validate(document, version):
    """Check a document of any kind. Raises ValidationError."""
    if document["kind"] != "LeaderWorkerSet":
        kubernetes_validate.validate(document, version, strict=True)
        return
    jsonschema.validate(document, SCHEMA)
    template = {
        "apiVersion": "v1",
        "kind": "PodTemplate",
        "metadata": {"name": document["metadata"]["name"]},
        "template": document["spec"]["leaderWorkerTemplate"]["workerTemplate"],
    }
    kubernetes_validate.validate(template, version, strict=True)


def as_workload(document):
    """Return the document with a Deployment's fields: the number of pods, and their component as selector."""
    spec = document["spec"]
    group = spec["leaderWorkerTemplate"]
    component = "app.kubernetes.io/component"
    label = group["workerTemplate"]["metadata"]["labels"][component]
    own = {
        "template": group["workerTemplate"],
        "replicas": spec["replicas"] * group["size"],
        "selector": {"matchLabels": {component: label}},
    }
    return {**document, "spec": spec | own}
