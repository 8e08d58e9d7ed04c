"""Terminals of Lark's library `common`, as regular expressions."""

_EXPONENT = "[eE][-+]?[0-9]+"
_DECIMAL = r"(?:[0-9]+\.[0-9]*|\.[0-9]+)"
_FLOAT = f"(?:[0-9]+{_EXPONENT}|{_DECIMAL}(?:{_EXPONENT})?)"
_NUMBER = f"(?:{_FLOAT}|[0-9]+)"
COMMON_TERMINALS = {
    "CNAME": "[a-zA-Z_][a-zA-Z0-9_]*",
    "CPP_COMMENT": r"//[^\n]*",
    "CR": r"\r",
    "C_COMMENT": r"/\*[^*]*\*+(?:[^*/][^*]*\*+)*/",
    "DECIMAL": _DECIMAL,
    "DIGIT": "[0-9]",
    "ESCAPED_STRING": r'"(?:[^"\\\n]|\\.)*"',
    "FLOAT": _FLOAT,
    "HEXDIGIT": "[0-9a-fA-F]",
    "INT": "[0-9]+",
    "LCASE_LETTER": "[a-z]",
    "LETTER": "[a-zA-Z]",
    "LF": r"\n",
    "NEWLINE": r"(?:\r?\n)+",
    "NUMBER": _NUMBER,
    "SH_COMMENT": r"#[^\n]*",
    "SIGNED_FLOAT": f"[-+]?{_FLOAT}",
    "SIGNED_INT": "[-+]?[0-9]+",
    "SIGNED_NUMBER": f"[-+]?{_NUMBER}",
    "SQL_COMMENT": r"--[^\n]*",
    "UCASE_LETTER": "[A-Z]",
    "WORD": "[a-zA-Z]+",
    "WS": r"[ \t\f\r\n]+",
    "WS_INLINE": r"[ \t]+",
}
