"""What a shell may say that changes what Ray, models or a terminal do, and is not heeded here."""

from collections.abc import MutableMapping

# of Ray: another cluster, other defaults; of hubs and stores: accounts, mirrors, other caches
_PREFIXES = ("RAY_", "RAYBATCH_", "HF_", "HUGGING", "TRANSFORMERS_", "VLLM_", "AWS_", "OPENAI_")
_NAMES = (
    *("COLUMNS", "LINES", "TERMINAL_WIDTH", "NO_COLOR", "FORCE_COLOR", "PY_COLORS"),
    *("CLICOLOR", "CLICOLOR_FORCE", "TTY_COMPATIBLE", "TTY_INTERACTIVE", "GITHUB_ACTIONS"),
    *("PYTHONWARNINGS", "PYTHONIOENCODING", "TZ", "XDG_CACHE_HOME"),
    # otherwise each process of Ray compiles the package
    "PYTHONDONTWRITEBYTECODE",
)
# settings of the suite, or of the machine: the folder of Ray's files, and the device of vLLM
_KEPT = ("RAYBATCH_TEST_", "RAY_TMPDIR", "VLLM_TARGET_DEVICE")
_HERE = ("127.0.0.1", "localhost", "::1")


def settle_environment(environment: MutableMapping[str, str]) -> None:
    """Set the variables of a process to what the suite expects; modified in place."""
    for name in list(environment):
        if name in _NAMES or (name.startswith(_PREFIXES) and not name.startswith(_KEPT)):
            del environment[name]
    if environment.get("TERM") in ("dumb", "unknown"):
        del environment["TERM"]
    for name in ("no_proxy", "NO_PROXY"):
        # servers of tests are on this host, behind no proxy
        others = [host for host in environment.get(name, "").split(",") if host]
        environment[name] = ",".join(dict.fromkeys([*others, *_HERE]))
    # niced workers could starve on a busy machine, and a test would never end
    environment["RAY_worker_niceness"] = "0"
    # a test without a cluster would join one that another process has started for a test
    environment["RAY_ENABLE_AUTO_CONNECT"] = "0"
