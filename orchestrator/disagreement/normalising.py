"""When two texts say the same, whatever their typography."""

import re
import unicodedata

_LETTER = r"[^\W\d_]"
_ASCII = str.maketrans(dict.fromkeys("−‐–", "-") | dict.fromkeys("⁄∕", "/"))
"""Signs that are written for a minus or a hyphen (minus, hyphen, en dash), and for a slash."""
_RAISED, _FRACTION = re.compile("([²³¹⁰ⁱ⁴-ⁿ]+)"), re.compile("([¼-¾⅐-⅞])")
"""What would run into the number before it: ``10²`` is not 102, and ``2½`` not 21/2."""
_COMMAND = re.compile(rf"(\\{_LETTER}+)")
r"""A command of LaTeX, whose last letter makes no word with what follows: ``\alpha-x``."""
_BULLET = re.compile(rf"^[ \t]*(?:-[ \t]+(?=[*_`\"(\[]*{_LETTER}[ \t]*{_LETTER})|\*[ \t])", re.MULTILINE)
"""What opens a line of a list. Behind a hyphen there is a word, since ``- 5`` and ``- x`` may be numbers."""
_MARKED = re.compile(r"(?<!`)(`{1,3})(?!`)([^`]+)\1(?!`)|(?<![\w.])(_{1,3})(?=[^\s_])([^_\n]*[^\s_])\3(?![\w(])")
"""Code between backticks, and words between underscores. What is between backticks may hold underscores of its own."""
_HYPHEN = re.compile(rf"(?<={_LETTER}{_LETTER})-+(?={_LETTER})|(?<={_LETTER})-+(?={_LETTER}{_LETTER})")
"""Between letters, of which one side has two or more: ``x-y`` is a difference."""
_BEGINS = r"(?:[\w\\(\[{$+-]|\.\d)"
"""What a right operand begins with; a left one ends in a letter, a digit or a closing bracket."""
_WORTH = re.compile(
    r"(?<!-)-(?=\s?(?:\.?\w|[^\w\s.,;:!?\"-]))|(?<!-)-{2,}(?=[\w\\(\[{$])"
    rf"|(?<=[\w)\]}}])\*\*?(?={_BEGINS})|(?<=[\w)\]}}]\s)\*\*?(?=\s{_BEGINS})"
    r"|!(?==)|(?<=[\d)])!(?=\s?[-+*/^=<>])|(?<=\b[^\W_])!(?=\s?[-+*/^=<>])|(?<![\w!])!(?=[\w(])"
    r"|(?<=\d)[.,](?=\d)|(?<!\w)\.(?=\d)|/|%|\w"
)
"""Letters, digits, and those marks without which it says something else: signs and operators, the point, the per cent.
Stars of Markdown are none, nor bullets and exclamations, nor brackets but for `_BRACKET`s."""
_BRACKET = re.compile(
    r"(?:(?<=[-/^×÷])|(?<=[-/^×÷]\s)|(?<=[\w)\]}]\*)|(?<=[\w)\]}]\s\*\s))(\()(?=[^()+-]*[+-][^()]*\))"
    r"|\((?=[^()+-]*[+-])[^()]*(\))(?=\s?[/^×÷]|\*(?=[\w(])|\s\*\s[\w(])"
)
"""One of a sum that is subtracted, multiplied, divided or raised: ``x - (y + z)`` and ``(1 + 2) * 3``."""


def normalised(text: str) -> str:
    """In lower case, with white space and punctuation as single spaces, without apostrophes and without
    backticks and underscores around words. Numbers keep their signs and points; operators stay, a minus where it is no
    hyphen, with what encloses a sum beside them, and so do symbols such as + and =, ~ and >.

    Example: ``"  The **Answer**: -3.5! "`` becomes ``"the answer -3.5"``, and ``"x-y, well-known"`` becomes
    ``"x-y well known"``.
    """
    unmarked = _MARKED.sub(r"\2\4", text)
    apart = _FRACTION.sub(r" \1", _RAISED.sub(r"^\1", unmarked))
    plain = unicodedata.normalize("NFKC", apart).casefold().translate(_ASCII).replace("'", "").replace("’", "")
    plain = _HYPHEN.sub(" ", _BULLET.sub(" ", _COMMAND.sub(r"\1 ", plain)))
    plain = " ".join(plain.split())
    worth = {place for found in _WORTH.finditer(plain) for place in range(found.start(), found.end())}
    worth |= {found.start(found.lastindex) for found in _BRACKET.finditer(plain) if found.lastindex}

    def is_kept(place: int, letter: str) -> bool:
        return place in worth or unicodedata.category(letter)[0] in "SM"

    kept = (letter if is_kept(place, letter) else " " for place, letter in enumerate(plain))
    return " ".join("".join(kept).split())
