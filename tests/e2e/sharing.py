"""The files that share engines. One worker of pytest runs them all, so that these engines start only once."""

SHARING = (
    "same_answers",
    "other_packages",
    "api",
    "vllm_metrics",
    "full_disk",
    "speculation",
    "chats",
    "classes",
    "operations",
    "tracing",
    "abuse",
    "failures",
)
