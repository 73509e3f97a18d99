"""Read `router.frontend`: vLLM's front-end arguments under vLLM's names, checked by vLLM's parser.

Leans on: vllm.entrypoints.launchers.cli_args (FrontendArgs and its add_cli_args, make_arg_parser,
validate_parsed_serve_args), vllm.utils.argparse_utils.FlexibleArgumentParser, vllm.tool_parsers.
ToolParserManager.list_registered,
vllm.engine.arg_utils.AsyncEngineArgs (its fields), vllm.renderers.chat_utils.load_chat_template;
transformers' compiler of chat templates.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import inspect
import json
from argparse import Action, Namespace
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NoReturn

from baton.services.config import EngineSettings, RouterSettings
from baton.services.engine.args import VLLM_VERSION, check_parser, import_parsers, place_of
from baton.services.errors import ConfigError

_KEY = "router.frontend"
_TLS = "end TLS at a proxy in front of the router"
_LIMITS = "the router has limits of its own: router.max_body_mib (docs/limits.md)"
_LOG = "use router.log_level"
_WORKERS = "start more workers instead (--prefill, --decode, --mixed)"
_TEXT = "only text is generated here"
_DP_SUPERVISOR = (
    "data_parallel_supervisor_port",
    "dp_supervisor_probe_interval_s",
    "dp_supervisor_probe_timeout_s",
    "dp_supervisor_probe_failure_threshold",
)
_SSL = ("ssl_keyfile", "ssl_certfile", "ssl_ca_certs", "ssl_cert_reqs", "ssl_ciphers", "enable_ssl_refresh")
# Front-end arguments that cannot be honoured, with advice. All others are honoured (docs/frontend.md).
REFUSED: Mapping[str, str] = {
    "host": "use router.host",
    "port": "use router.port",
    "uds": "the router listens only on TCP: use router.host and router.port",
    "api_key": "use router.api_key",
    **dict.fromkeys(_SSL, _TLS),
    "h11_max_incomplete_event_size": _LIMITS,
    "h11_max_header_count": _LIMITS,
    "uvicorn_log_level": _LOG,
    "disable_uvicorn_access_log": f"{_LOG}: there is an access log at debug only",
    "disable_access_log_for_endpoints": f"{_LOG}: there is an access log at debug only",
    "chat_template": "use router.chat_template",
    "tool_call_parser": "use engine.tool_call_parser",
    "enable_auto_tool_choice": "use engine.tool_call_parser, which turns it on",
    "reasoning_parser": "use engine.reasoning_parser",
    "lora_modules": "use engine.lora",
    "trust_request_chat_template": "a client's template would run in the router, next to all other "
    "requests: use router.chat_template",
    "trust_request_mm_kwargs": "images are prepared in one way for all clients, as workers keep them",
    "enable_flash_late_interaction": _TEXT,
    "tool_server": "clients run tools, the router does not",
    "tokens_only": "it is for vLLM's own disaggregation",
    "enable_scale_out": "it is for vLLM's own disaggregation",
    "grpc": "the router speaks HTTP",
    "grpc_port": "the router speaks HTTP",
    **dict.fromkeys(_DP_SUPERVISOR, _WORKERS),
    "headless": "workers have no front end: start `baton prefill`, `baton decode` or `baton mixed`",
    "api_server_count": "start more routers instead: `baton router`",
    "config": "use Baton's own --config",
    "model_tag": "use engine.model",
}


def check_names(router: RouterSettings) -> dict[str, Any]:
    """Return the arguments by vLLM's names, with underscores. Does not import vLLM, so errors come early.

    Raises ConfigError for an argument that cannot be honoured or is given twice.
    """
    found: dict[str, Any] = {}
    for key, value in router.frontend.items():
        name = key.replace("-", "_")
        if name in REFUSED:  # without the value, which may be an API key
            raise ConfigError(f"{_KEY}.{key} is not for you to set: {REFUSED[name]}")
        if name in found:
            raise ConfigError(f"{_KEY}.{key} is given twice, with - and with _")
        found[name] = value
    return found


def frontend_namespace(engine: EngineSettings, router: RouterSettings) -> Namespace:
    """Return the arguments of vLLM's app: its defaults, `router.frontend`, and settings with their own keys.

    Loads parser plug-ins. Raises ConfigError for values that vLLM would refuse.
    """
    from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
    from vllm.exceptions import VLLMError

    given = check_names(router)
    args = _parsed(given)
    for name, value in vars(make_arg_parser(_parser()).parse_args([])).items():
        if not hasattr(args, name):
            setattr(args, name, value)
    args.enable_log_requests = bool(engine.extra.get("enable_log_requests", False))
    args.disable_log_stats = bool(engine.extra.get("disable_log_stats", False))
    args.chat_template = router.chat_template or None
    _check_template(router.chat_template)
    _take_tool_parser(args, engine)
    _check_middleware(args.middleware)
    if args.enable_log_outputs and not args.enable_log_requests:
        raise ConfigError(f"{_KEY}.enable_log_outputs needs engine.extra.enable_log_requests")
    try:
        validate_parsed_serve_args(args)
    except (ValueError, TypeError, VLLMError) as error:
        raise ConfigError(f"{_KEY}: {_one_line(error).removeprefix('Error: ')}") from None
    return args


def comment_s(router: RouterSettings) -> float:
    """Return after how many silent seconds a stream gets a comment; 0: never."""
    return float(check_names(router).get("sse_keep_alive_interval") or 0)


def _parsed(given: Mapping[str, Any]) -> Namespace:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.entrypoints.launchers.cli_args import FrontendArgs

    parser = FrontendArgs.add_cli_args(_parser())
    actions = {action.dest: action for action in parser._actions if action.dest != "help"}
    of_engine = {field.name for field in dataclasses.fields(AsyncEngineArgs)}
    for name in given:
        if name in actions:
            continue
        where = f"{_KEY}.{name}"
        if name in of_engine:
            raise ConfigError(f"{where} is an argument of vLLM's engine: use {place_of(name)}")
        close = difflib.get_close_matches(name, list(actions), n=3)
        hint = f"; did you mean {' or '.join(close)}?" if close else ""
        raise ConfigError(f"{where}: vLLM {VLLM_VERSION}'s front end has no such argument{hint}")
    parsed: Namespace = parser.parse_args([])
    for name, value in given.items():  # one by one, so that the error names the argument
        try:
            one = parser.parse_args(list(_words(actions[name], value)))
        except (_Refused, ValueError, TypeError) as error:
            raise ConfigError(f"{_KEY}.{name} (value {value!r}): {_one_line(error)}") from None
        setattr(parsed, name, getattr(one, name))
    return parsed


def _words(action: Action, value: Any) -> Iterator[str]:
    flag = f"--{action.dest.replace('_', '-')}"
    if value is None:
        return  # vLLM's default
    if action.nargs == 0:
        if not isinstance(value, bool):
            raise _Refused("true or false is needed")
        yield flag if value else f"--no-{flag[2:]}"
        return
    if isinstance(action.default, list) and not isinstance(value, list):
        raise _Refused("a list is needed")
    if action.type is json.loads:
        if not isinstance(action.default, list) and not isinstance(value, dict):
            raise _Refused("a mapping is needed")
        yield f"{flag}={json.dumps(value)}"
    else:  # a list becomes a repeated flag
        texts = value if isinstance(value, list) else [value]
        yield from (f"{flag}={one if isinstance(one, str) else json.dumps(one)}" for one in texts)


class _Refused(Exception):
    pass


def _parser() -> Any:
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    class Parser(FlexibleArgumentParser):
        def error(self, message: str) -> NoReturn:
            """Raise the message, instead of printing the usage and exiting."""
            raise _Refused(message.partition(": ")[2] or message)

    return Parser()


def _check_template(template: str) -> None:
    if not template:
        return
    from jinja2 import TemplateError
    from transformers.utils.chat_template_utils import _compile_jinja_template
    from vllm.exceptions import VLLMError
    from vllm.renderers.chat_utils import load_chat_template, validate_chat_template

    try:
        validate_chat_template(template)
        _compile_jinja_template(load_chat_template(template))
    except (ValueError, OSError, TemplateError, VLLMError) as error:
        shown = template if len(template) < 100 else f"{template[:97]}..."
        raise ConfigError(
            f"router.chat_template: value {shown!r} is not allowed: {_one_line(error)}"
        ) from None


def _check_middleware(paths: Iterable[str]) -> None:
    for path in paths:
        module, _, name = path.rpartition(".")
        try:
            found = getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError, ValueError) as error:
            raise ConfigError(f"{_KEY}.middleware: cannot load {path!r}: {_one_line(error)}") from None
        if not (inspect.isclass(found) or inspect.iscoroutinefunction(found)):
            raise ConfigError(f"{_KEY}.middleware: {path!r} is neither a class nor a coroutine function")


def _take_tool_parser(args: Namespace, engine: EngineSettings) -> None:
    from vllm.tool_parsers import ToolParserManager

    if args.tool_parser_plugin:
        import_parsers(f"{_KEY}.tool_parser_plugin", args.tool_parser_plugin)
    if engine.tool_call_parser:
        check_parser("engine.tool_call_parser", engine.tool_call_parser, ToolParserManager.list_registered())
        args.tool_call_parser = engine.tool_call_parser
        args.enable_auto_tool_choice = True


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
