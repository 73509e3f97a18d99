import dataclasses
import re

import pytest
from vllm.entrypoints.launchers.cli_args import FrontendArgs, make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser

from baton.services.config import EngineSettings, RouterSettings
from baton.services.errors import ConfigError
from baton.services.router.vllm.frontend_args import REFUSED, frontend_namespace
from harness.support import ROOT

GZIP = "starlette.middleware.gzip.GZipMiddleware"
PAGE = ROOT / "docs" / "frontend.md"


def namespace(engine=None, /, **router):
    return frontend_namespace(EngineSettings(**(engine or {})), RouterSettings(**router))


def refusal(engine=None, /, **router):
    with pytest.raises(ConfigError) as caught:
        namespace(engine, **router)
    return str(caught.value)


def test_defaults_are_vllms():
    assert vars(namespace()) == vars(make_arg_parser(FlexibleArgumentParser()).parse_args([]))


def test_both_spellings_and_every_kind_of_value():
    args = namespace(
        frontend={
            "enable-request-id-headers": True,
            "enable_log_deltas": False,
            "default_chat_template_kwargs": {"enable_thinking": False},
            "allowed_origins": ["https://a.example"],
            "middleware": [GZIP, GZIP],
            "max_log_len": 5,
            "fingerprint-value": "--x.y z",
            "response_role": None,
        }
    )
    assert args.enable_request_id_headers
    assert not args.enable_log_deltas
    assert args.default_chat_template_kwargs == {"enable_thinking": False}
    assert (args.allowed_origins, args.middleware) == (["https://a.example"], [GZIP, GZIP])
    assert (args.max_log_len, args.fingerprint_value, args.response_role) == (5, "--x.y z", "assistant")


@pytest.mark.parametrize(
    ("frontend", "line"),
    [
        (
            {"sse_keepalive_interval": 5},
            "sse_keepalive_interval: vLLM 0.32.0's front end has no such argument; did you mean "
            "sse_keep_alive_interval?",
        ),
        ({"max_log_len": "abc"},
         "max_log_len (value 'abc'): Value abc cannot be converted to <class 'int'>."),
        ({"log_error_stack": "yes"}, "log_error_stack (value 'yes'): true or false is needed"),
        ({"middleware": "a.b"}, "middleware (value 'a.b'): a list is needed"),
        ({"middleware": ["nowhere.b"]}, "middleware: cannot load 'nowhere.b': No module named 'nowhere'"),
        ({"middleware": ["os.name"]}, "middleware: 'os.name' is neither a class nor a coroutine function"),
        ({"default_chat_template_kwargs": [1]},
         "default_chat_template_kwargs (value [1]): a mapping is needed"),
        (
            {"fingerprint_mode": "ful"},
            "fingerprint_mode (value 'ful'): invalid choice: 'ful' "
            "(choose from 'custom', 'full', 'hash', 'none')",
        ),
        ({"host": "x"}, "host is not for you to set: use router.host"),
        ({"ssl-keyfile": "x"},
         "ssl-keyfile is not for you to set: end TLS at a proxy in front of the router"),
        ({"reasoning_parser": "hf"}, "reasoning_parser is not for you to set: use engine.reasoning_parser"),
        ({"max_model_len": 5},
         "max_model_len is an argument of vLLM's engine: use engine.extra.max_model_len"),
        (
            {"otlp-traces-endpoint": "http://x:4317"},
            "otlp_traces_endpoint is an argument of vLLM's engine: use tracing.endpoint: the router "
            "writes the traces of all processes",
        ),
        ({"max_log_len": 5, "max-log-len": 6}, "max-log-len is given twice, with - and with _"),
        ({"tool_parser_plugin": "/no.py"}, "tool_parser_plugin: the file '/no.py' does not exist"),
        ({"enable_log_outputs": True}, "enable_log_outputs needs engine.extra.enable_log_requests"),
    ],
)  # fmt: skip
def test_values_that_vllm_would_refuse(frontend, line):
    assert refusal(frontend=frontend) == f"router.frontend.{line}"


def test_arguments_that_contradict_each_other():
    stats = refusal({"extra": {"disable_log_stats": True}}, frontend={"enable_per_request_metrics": True})
    why = "router.frontend: --enable-per-request-metrics requires engine statistics logging"
    assert stats.startswith(why)


@pytest.mark.parametrize(
    ("template", "why"),
    [("/no.jinja", "appears path-like, but doesn't exist!"), ("{% if", "unexpected 'end of template'")],
)
def test_a_wrong_chat_template(template, why):
    line = refusal(chat_template=template)
    assert line.startswith(f"router.chat_template: value {template!r} is not allowed: ")
    assert why in line
    assert "\n" not in line


def test_every_argument_of_vllms_is_decided():
    """The page lists all arguments as honoured or refused; another vLLM may have others."""
    of_vllm = {field.name for field in dataclasses.fields(FrontendArgs)}
    honoured, refused = (
        set(re.findall(r"`(\w+)`", part.partition("| --- |")[2])) for part in _tables(PAGE.read_text())
    )
    assert refused == set(REFUSED)
    assert honoured == of_vllm - refused


def _tables(page):
    """Return the first column of the page's two tables of arguments."""
    sections = [
        page.partition(f"\n## {title}\n")[2].partition("\n## ")[0] for title in ("Honoured", "Refused")
    ]
    return ["\n".join(re.findall(r"^(\|[^|]*\|)", part, re.MULTILINE)) for part in sections]
