"""The configuration: one tree of settings for all processes of a deployment.

A value comes from the first source that has it: command-line flag, environment (`BATON_SECTION__KEY`), YAML
file (`--config`, or BATON_CONFIG), default. Unknown keys are refused.
"""

from baton.services.config.fields import REVEAL, SECRET, leaves
from baton.services.config.loading import ENV_PREFIX, from_text, laid_over, load
from baton.services.config.router import (
    MediaSettings,
    OpsSettings,
    RouterSettings,
    SecuritySettings,
    TracingSettings,
)
from baton.services.config.tree import GONE, ModelSettings, Settings, keys, section_of, suggest, unknown
from baton.services.config.workers import (
    AutoscaleSettings,
    EngineSettings,
    HandoffSettings,
    PolicySettings,
    SchedulerSettings,
)

__all__ = [
    "ENV_PREFIX",
    "GONE",
    "REVEAL",
    "SECRET",
    "AutoscaleSettings",
    "EngineSettings",
    "HandoffSettings",
    "MediaSettings",
    "ModelSettings",
    "OpsSettings",
    "PolicySettings",
    "RouterSettings",
    "SchedulerSettings",
    "SecuritySettings",
    "Settings",
    "TracingSettings",
    "from_text",
    "keys",
    "laid_over",
    "leaves",
    "load",
    "section_of",
    "suggest",
    "unknown",
]
