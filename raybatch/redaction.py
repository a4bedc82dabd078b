"""Takes secrets out of texts that people and files get to see: logs, errors, reports."""

import logging
import re

_HIDDEN = "***"
# longer texts are cut first, so that hostile input costs little
_MAX_CHARS = 1 << 16

_SECRET_WORD = (
    r"(?:pass(?:word|wd|phrase)?|secret|token|credentials?|signature|authorization|"
    r"(?:api|access|account|private|shared|encryption|session)[_-]?key|key[_-]?id|sig|pwd)"
)
# user:password@ of a URL; a password may hold slashes and further at signs. There is none where no
# colon and no at sign comes before the first slash, as in s3://bucket/model@revision
_IN_URL = re.compile(r"(?i)\b([a-z][a-z0-9+.-]{0,30}://)(?=[^\s'\"<>/]*[:@])([^\s'\"<>]{1,2000})@")
# name=value, "name": "value", --name value, in queries, headers, options and JSON
_NAMED = re.compile(
    rf"(?i)((?<![a-z])[\w.-]{{0,64}}?{_SECRET_WORD}(?:s|_id|-id)?\\?[\"']?\s{{0,3}}(?:=>|[=:])\s{{0,3}})"
    r"(\\?\"[^\"\n]{1,4000}\"?|\\?'[^'\n]{1,4000}'?|[^\s,;&'\"(){}\[\]]{1,4000})"
)
_BEARER = re.compile(r"(?i)\b(bearer|basic)\s+[a-z0-9._~+/=-]{6,}")
# what providers begin their tokens with; hf_overrides is an option of vLLM
_KNOWN = re.compile(
    r"\b(?:hf_(?![a-z_]+\b)\w{8,}|sk-[\w-]{8,}|gh[opsur]_\w{8,}|github_pat_\w{8,}|glpat-[\w-]{8,}|"
    r"xox[abprs]-[\w-]{8,}|(?:AKIA|ASIA)[A-Z0-9]{12,}|AIza[\w-]{20,}|"
    r"eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*)"
)
_PEM = re.compile(r"-----BEGIN [A-Z ]{1,40}-----[\s\S]{0,20000}?(?:-----END [A-Z ]{1,40}-----|\Z)")
# who is hidden already, and counts such as "tokens: 12", stay as they are
_HARMLESS = re.compile(r"(?:\*{3}|\d{1,12}(?:\.\d+)?|true|false|none|null)\Z", re.IGNORECASE)
# "num_input_tokens: int32" is a column of a schema
_TYPE = re.compile(
    r"(?:u?int(?:8|16|32|64)|halffloat|float(?:16|32|64)?|double|bool|(?:large_)?(?:string|binary)|"
    r"(?:large_)?list<.*|fixed_size_list<.*|struct<.*|dictionary<.*|timestamp|date32|date64)>?\Z"
)
# "HF_TOKEN: by its name a secret" is a sentence
_WORD = re.compile(r"[A-Za-z]{1,11}\Z")


def redacted(text: str) -> str:
    """Return a text with passwords, tokens and keys replaced by `***`.

    The text may be hostile; only its first 65,536 characters are kept.
    """
    if len(text) > _MAX_CHARS:
        text = text[:_MAX_CHARS] + " ..."
    text = _PEM.sub(_HIDDEN, text)
    text = _IN_URL.sub(rf"\1{_HIDDEN}@", text)
    text = _BEARER.sub(rf"\1 {_HIDDEN}", text)
    text = _NAMED.sub(_hide_value, text)
    return _KNOWN.sub(_HIDDEN, text)


def _hide_value(match: re.Match[str]) -> str:
    name, value = match[1], match[2]
    is_prose = name.endswith(" ") and "pass" not in name.lower() and _WORD.match(value)
    if is_prose or _HARMLESS.match(value.strip("\\\"'")) or _TYPE.match(value):
        return match[0]
    return name + _HIDDEN


class DiscreetFormatter(logging.Formatter):
    """Writes log lines without secrets, tracebacks included."""

    def __init__(self) -> None:
        super().__init__("%(levelname)s %(name)s: %(message)s")

    def format(self, record: logging.LogRecord) -> str:
        return redacted(super().format(record))
