"""Entries of a file of callers, and the metadata by which they are known."""

import hashlib


def caller_entry(name: str, token: str | None = None, **fields: object) -> str:
    lines = [f'name = "{name}"']
    if token is not None:
        lines.append(f'token_sha256 = ["{hashlib.sha256(token.encode()).hexdigest()}"]')
    lines += [f"{key} = {str(value).lower() if isinstance(value, bool) else value}" for key, value in fields.items()]
    return "[[caller]]\n" + "\n".join(lines) + "\n"


def bearer(token: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {token}"),)
