"""What callers are told when the grammar library refuses their grammar: its words, without theirs.

Knows the sentences of llguidance 1.9. Guards: nothing of a grammar's own text passes; words of the JSON Schema
specification are nobody's, and name what is not supported.
"""

import re

_MAX_MESSAGE_CHARS = 200
_NOTHING_GOES_ON = ("NoExtension", "NoExtensionBias")
_ONE_OF = "oneOf is supported only where types or constants tell its alternatives apart; else use anyOf"
_KEYWORDS_IN_ROWS = (
    "$anchor $comment $defs $dynamicAnchor $dynamicRef $id $recursiveAnchor $recursiveRef $ref $schema $vocabulary "
    "additionalItems additionalProperties allOf anyOf const contains contentEncoding contentMediaType contentSchema "
    "default definitions dependencies dependentRequired dependentSchemas deprecated description else enum examples "
    "exclusiveMaximum exclusiveMinimum format if items maxContains maxItems maxLength maxProperties maximum "
    "minContains minItems minLength minProperties minimum multipleOf not oneOf pattern patternProperties prefixItems "
    "properties propertyNames readOnly required then title type unevaluatedItems unevaluatedProperties "
    "uniqueItems writeOnly"
)
_KEYWORDS = frozenset(_KEYWORDS_IN_ROWS.split())
_FORMATS_IN_ROWS = (
    "date date-time duration email hostname idn-email idn-hostname ipv4 ipv6 iri iri-reference json-pointer regex "
    "relative-json-pointer time uri uri-reference uri-template uuid"
)
_FORMATS = frozenset(_FORMATS_IN_ROWS.split())
_PLACE = re.compile(r"(?:at )?(\d+)\((\d+)\): ")
_QUOTED = re.compile(r"\"([^\"]*)\"?|'([^']*)'")
_BARE = re.compile(r"((?:Invalid type|Unknown format|Unknown common regex|circular reference in token|, got):? )(.+)")
_PATTERN = re.compile(r"(in regex )/.*")
_GRAMMAR_NAME = re.compile(r"@\S+")
_LISTED = ("; following", "following are available")
_SIGN = re.compile(r"[^\w\s]{1,3}|\\n")


def library_message(text: str) -> str:
    """What the library says is wrong, and where in the grammar if it knows, without what it quotes of it."""
    lines = text.strip().splitlines() or ["it cannot be used"]
    told = next((line for line in lines if line.startswith("error:")), lines[0])
    if told in _NOTHING_GOES_ON:
        return "no text matches it"
    if "oneOf constraints are not supported" in told:
        return _ONE_OF
    place = _PLACE.match(lines[0])
    told = _PLACE.sub("", told, count=1)
    for listed in _LISTED:
        told = told.partition(listed)[0]
    told = _PATTERN.sub(r"\1/.../", told)
    told = _BARE.sub(lambda found: found[1] + (found[2] if found[2] in _FORMATS else "..."), told)
    told = _GRAMMAR_NAME.sub("@...", _QUOTED.sub(_shown, told)).strip(" ;")[:_MAX_MESSAGE_CHARS].strip()
    return f"line {place[1]}, column {place[2]}: {told}" if place else told


def _shown(quoted: "re.Match[str]") -> str:
    """A quotation with its marks, hidden unless it is a word of the specification or a sign."""
    mark = quoted[0][0]
    word = quoted[1] if mark == '"' else quoted[2]
    is_nobodys = word in _KEYWORDS or (mark == "'" and _SIGN.fullmatch(word))
    return f"{mark}{word if is_nobodys else '...'}{mark}"
