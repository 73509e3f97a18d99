"""Methods are found by name and loaded on demand."""

import subprocess

import pytest

from baton.services.decode.proposers.registry import METHODS, method
from baton.services.errors import ConfigError
from harness.support import CALL_S, PYTHON, ROOT

BUILT_IN = ["draft_model", "eagle", "eagle3", "medusa", "mtp", "ngram", "suffix"]


@pytest.mark.parametrize("name", BUILT_IN)
def test_a_method_is_found_by_its_name(name):
    assert name in METHODS.names()
    assert method(name).name == name


@pytest.mark.parametrize("name", ["deepseek_mtp", "glm4_moe_mtp", "ernie_mtp", "qwen3_5_mtp", "mimo_mtp"])
def test_the_names_of_other_systems_mean_mtp(name):
    assert method(name).name == "mtp"
    assert name not in METHODS.names()


@pytest.mark.parametrize(
    ("name", "said"),
    [("eagel3", "did you mean 'eagle3'?"), ("NGRAM", "did you mean 'ngram'?"), ("zzz", ", ".join(BUILT_IN))],
)
def test_an_unknown_method_is_refused_with_its_key_and_the_list(name, said):
    with pytest.raises(ConfigError, match=r"^engine\.speculative_config\.method: there is no") as error:
        method(name)
    assert said in str(error.value)
    assert ", ".join(BUILT_IN) in str(error.value)


def test_the_registry_loads_no_method_and_no_engine():
    """`baton up` and `status` import it, so it must be cheap."""
    code = (
        "import sys; from baton.services.decode.proposers import registry, validation;"
        "registry.METHODS.names();"
        "bad = [name for name in sys.modules if name.split('.')[0] in ('torch', 'vllm', 'numba')"
        " or name.endswith(('.draft_models', '.ngram', '.suffix'))]; sys.exit(', '.join(bad) or 0)"
    )
    done = subprocess.run(
        [PYTHON, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=CALL_S, check=False
    )
    assert done.returncode == 0, done.stderr
