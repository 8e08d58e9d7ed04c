"""Values of `format` as regular expressions, for strings without quotes. JSON tools allow the same texts."""

from __future__ import annotations

# The formats that the drafts of JSON Schema define, 4 to 2020-12. Any other name is an annotation there. llguidance
# refuses those that it does not enforce.
_NAMES = frozenset(
    "date date-time duration email hostname idn-email idn-hostname ipv4 ipv6 iri iri-reference json-pointer regex "
    "relative-json-pointer time uri uri-reference uri-template uuid".split()
)
_RENAMED = {"host-name": "hostname", "ip-address": "ipv4"}  # draft 3's spelling

_DAY = "((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)|02-(0[1-9]|[12][0-9]))"
_DATE = f"[0-9]{{4}}-{_DAY}"
_HOUR_AND_MINUTE = "([01][0-9]|2[0-3]):[0-5][0-9]"
_TIME = rf"{_HOUR_AND_MINUTE}:([0-5][0-9]|60)(\.[0-9]+)?([zZ]|[-+]{_HOUR_AND_MINUTE})"

_OCTET = "(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_IPV4 = rf"{_OCTET}(\.{_OCTET}){{3}}"
_GROUP = "[0-9A-Fa-f]{1,4}"
_LABEL = "[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_HOSTNAME = rf"{_LABEL}(\.{_LABEL})*"
_ATOM = "[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]+"
_NAME_CHAR = "([A-Za-z0-9._~!$&'()*+,;=-]|%[0-9A-Fa-f]{2})"
_PATH_CHAR = "([A-Za-z0-9._~!$&'()*+,;=:@-]|%[0-9A-Fa-f]{2})"
_QUERY = f"({_PATH_CHAR}|[/?])*"


def _write_ipv6() -> str:
    ways = [f"{_GROUP}(:{_GROUP}){{7}}"]
    for num_before in range(8):
        before = f"{_GROUP}(:{_GROUP}){{{num_before - 1}}}" if num_before else ""
        num_after = 7 - num_before  # maximum, because the colons stand for at least one group
        after = f"({_GROUP}(:{_GROUP}){{0,{num_after - 1}}})?" if num_after else ""
        ways.append(f"{before}::{after}")
    return f"({'|'.join(ways)})"


def _write_duration() -> str:
    time = "T([0-9]+H([0-9]+M([0-9]+S)?)?|[0-9]+M([0-9]+S)?|[0-9]+S)"
    date = "([0-9]+Y([0-9]+M([0-9]+D)?)?|[0-9]+M([0-9]+D)?|[0-9]+D)"
    return f"P({date}({time})?|{time}|[0-9]+W)"


def _write_uri() -> str:
    host = rf"(\[{_write_ipv6()}\]|{_NAME_CHAR}*)"
    authority = f"//(({_NAME_CHAR}|:)*@)?{host}(:[0-9]*)?(/{_PATH_CHAR}*)*"
    rootless = f"{_PATH_CHAR}+(/{_PATH_CHAR}*)*"
    return rf"[A-Za-z][A-Za-z0-9+.-]*:({authority}|/({rootless})?|{rootless})?(\?{_QUERY})?(#{_QUERY})?"


FORMATS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}[tT]{_TIME}",
    "duration": _write_duration(),
    "email": rf"{_ATOM}(\.{_ATOM})*@({_HOSTNAME}|\[{_IPV4}\])",
    "hostname": _HOSTNAME,
    "ipv4": _IPV4,
    "ipv6": _write_ipv6(),
    "uri": _write_uri(),
    "uuid": "[0-9A-Fa-f]{8}(-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}",
}


def normalize_format(name: object) -> str | None:
    """Return the current name of a format that a draft of JSON Schema defines; None for others, which are
    annotations."""
    if not isinstance(name, str):
        return None
    name = _RENAMED.get(name, name)
    return name if name in _NAMES else None
