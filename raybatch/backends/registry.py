"""The table of backend kinds: look up, check and start the backend of a config.

Other distributions add kinds by entry points, which are loaded when one of them is asked for.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from raybatch.backends.base import Backend, BackendType, EngineStart, check_checkpoint
from raybatch.backends.fake import FAKE
from raybatch.backends.native import NATIVE
from raybatch.backends.transformers import TRANSFORMERS
from raybatch.backends.vllm import VLLM
from raybatch.backends.vllm.args import ENGINE_ARGS, VllmOptions, native_options, place_of
from raybatch.config import BackendConfig, EngineConfig
from raybatch.config.option import fields_of
from raybatch.errors import ConfigError, MissingDependency, did_you_mean
from raybatch.installation import OPENAI, added_backends
from raybatch.records.share import ShareLink
from raybatch.text.text_files import check_template, check_tokenizer

# options of vLLM that users try with other backends
_PARSERS = ("reasoning_parser", "tool_call_parser")


def _length_of_either(
    backend: BackendConfig, engine: EngineConfig, folder: Path | None
) -> int | None:
    try:
        return NATIVE.max_model_len(backend, engine, folder)
    except ConfigError as refusal:
        try:
            return VLLM.max_model_len(replace(backend, kind="vllm"), engine, folder)
        except ConfigError:
            raise refusal from None


# undecided: the common part of native and vLLM
AUTO = BackendType(
    kind="auto",
    create=NATIVE.create,
    max_model_len=_length_of_either,
    package=NATIVE.package,
    missing=NATIVE.missing,
    check_files=lambda folder, _: check_checkpoint(folder, as_native=True),
)

BACKENDS: Mapping[str, BackendType] = {
    each.kind: each for each in (AUTO, NATIVE, VLLM, TRANSFORMERS, FAKE)
}
# kinds of other distributions, with the message end that names what to install
_ELSEWHERE = {"openai": OPENAI}


def known_backends() -> dict[str, BackendType | None]:
    """Return all backend types by kind; None for one whose distribution is not installed here."""
    added = {**dict.fromkeys(_ELSEWHERE), **added_backends()}
    known: dict[str, BackendType | None] = {**BACKENDS, **added, **BACKENDS}
    # the one for tests is listed last
    known[FAKE.kind] = known.pop(FAKE.kind)
    return known


def type_of(backend: BackendConfig) -> BackendType:
    """Return the `BackendType` of a backend.

    Raises ConfigError if its kind is unknown, and MissingDependency if the distribution that has it
    is not installed.
    """
    return BACKENDS.get(backend.kind) or _added_type(backend.kind)


@cache
def _added_type(kind: str) -> BackendType:
    found: BackendType | None = added_backends(kind).get(kind)
    if found is not None:
        return found
    if kind in _ELSEWHERE:
        raise MissingDependency(f"the backend {kind!r} needs {_ELSEWHERE[kind]}")
    known = known_backends()
    raise ConfigError(
        f"backend.kind must be one of {', '.join(known)}, got {kind!r}{did_you_mean(kind, known)}"
    )


def check_options(backend: BackendConfig, engine: EngineConfig) -> None:
    """Raise ConfigError if a backend does not support an option that is set, or the task."""
    is_decided = backend.is_decided
    if not is_decided:
        # options of the native engine are those that vLLM has as well
        backend = replace(backend, kind="native")
    of_kind = type_of(backend)
    if backend.task not in of_kind.tasks:
        known = filter(None, known_backends().values())
        real = (each for each in known if each.has_weights or each.is_endpoint)
        able = [repr(each.kind) for each in real if backend.task in each.tasks]
        raise ConfigError(
            f"the {backend.kind} backend {of_kind.makes}; task {backend.task!r} needs "
            f"backend={' or '.join(able)}"
        )
    if of_kind in (NATIVE, VLLM):
        # other kinds may have options with names of vLLM's engine arguments
        of_vllm = ENGINE_ARGS.intersection(backend.options).difference(fields_of(VllmOptions))
        for name in sorted(of_vllm):
            raise ConfigError(f"backend.options: unknown option {name!r}{place_of(name)}")
    for name in () if of_kind.takes_vllm_options else _PARSERS:
        if name in backend.options:
            raise ConfigError(
                f"backend.options.{name} names a parser of vLLM and needs backend='vllm'; an "
                "endpoint parses answers itself: set return_reasoning or return_tool_calls instead"
            )
    if of_kind.refuses_native_options:
        # options set to their neutral value are accepted
        if names := [name for name in native_options(engine) if getattr(engine, name)]:
            raise ConfigError(
                f"engine.{names[0]} is an option of the native engine, not of the {backend.kind} "
                "backend; remove it"
            )
        if engine.weights == "shared":
            raise ConfigError(
                f"engine.weights is an option of the native engine and of vLLM, not of the "
                f"{backend.kind} backend; remove it"
            )
        if engine.kv_cache_dtype != "auto":
            raise ConfigError(
                f"engine.kv_cache_dtype is an option of the native engine and of vLLM, not of the "
                f"{backend.kind} backend; remove it"
            )
    if backend.options and not is_decided:
        given = ", ".join(sorted(backend.options))
        raise ConfigError(
            f"backend.options: backend 'auto' takes no options, got {given}; choose the backend "
            "that has them, such as backend.kind: vllm (--set backend=vllm)"
        )
    of_kind.check(backend, engine)


def check_files(
    folder: Path,
    backend: BackendConfig,
    *,
    reads_template: bool,
    has_tools: bool = False,
    has_weights: bool = True,
) -> None:
    """Raise ConfigError if files in a model's folder show that the backend's engines cannot run it.

    Only headers of weight files are read. For the native engine the tensors are checked; other
    backends may support more than is known here, so only checkpoints that no backend can load are
    refused. The error names the file, tensor or line, and what to do.

    Args:
        reads_template: also check the chat template.
        has_tools: with tools for the template.
        has_weights: false for the folder of an endpoint, which has a tokenizer only.
    """
    if has_weights:
        type_of(backend).check_files(folder, backend)
    check_tokenizer(folder)
    if reads_template:
        check_template(folder, has_tools=has_tools)


def check_installed(backend: BackendConfig) -> None:
    """Raise MissingDependency if the package of a backend's engine is not installed here."""
    of_kind = type_of(backend)
    if of_kind.package and find_spec(of_kind.package) is None:
        raise MissingDependency(of_kind.missing())


def check_version(backend: BackendConfig) -> None:
    """Raise ConfigError if this host has an unsupported version of a backend's engine."""
    if (reason := type_of(backend).why_unusable()) is not None:
        raise ConfigError(reason)


def create_backend(
    model: str,
    backend: BackendConfig,
    engine: EngineConfig,
    *,
    num_engines_on_host: int = 1,
    num_replicas: int | None = 1,
    share: ShareLink | None = None,
) -> Backend:
    """Start an engine and return its backend, ready for `submit`; arguments as in `EngineStart`.

    A backend of kind "auto" starts the native engine, for callers without a cluster. Raises
    ConfigError, EndpointError or MissingDependency.
    """
    check_options(backend, engine)
    check_installed(backend)
    check_version(backend)
    of_kind = type_of(backend)
    start = EngineStart(
        model=model,
        backend=backend,
        engine=engine,
        num_engines_on_host=num_engines_on_host,
        num_replicas=num_replicas,
        share=share,
    )
    return of_kind.create(start)


def answering_options(backend: BackendConfig, model: str) -> Mapping[str, Any]:
    """Return "kind" and "options" of a backend, with only the options that determine answers.

    They are part of the job's fingerprint.
    """
    options = type_of(backend).answering(backend.options, model)
    return {"kind": backend.kind, "options": dict(options)}


def parsed_columns(backend: BackendConfig, engine: EngineConfig) -> tuple[str, ...]:
    """Return the names of the output columns that a backend adds to the text, such as `reasoning`.

    Pooling tasks have none.
    """
    return type_of(backend).parsed_columns(backend, engine) if backend.task == "generate" else ()
