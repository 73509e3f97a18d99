"""The context of trials for a vocabulary of 150,000 tokens."""

import pytest

from baton.services.engine.grammars.trial import Context
from tests.services.engine.grammars.vocabulary import big_tokenizer


@pytest.fixture(scope="session")
def context(tmp_path_factory):
    from vllm.config import StructuredOutputsConfig
    from vllm.engine.arg_utils import AsyncEngineArgs

    folder = big_tokenizer(tmp_path_factory.mktemp("big"))
    model = AsyncEngineArgs(model=str(folder), max_model_len=2048).create_model_config()
    return Context(model, StructuredOutputsConfig(), 5)
