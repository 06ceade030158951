"""A tool server: words by their number."""

import verifiers.v1 as vf

LETTERS = "abcdefgh"


def number_of(word: str) -> int:
    return sum(LETTERS.index(letter) * 8**place for place, letter in enumerate(word))


class Dictionary(vf.Toolset[vf.ToolsetConfig]):
    TOOL_PREFIX = "words"

    @vf.tool
    def word(self, number: int, length: int = 3) -> str:
        """The word that has this number."""
        if number < 0:
            raise ValueError("numbers begin at 0")
        return "".join(LETTERS[number // 8**place % 8] for place in range(length))


if __name__ == "__main__":
    Dictionary.run()
