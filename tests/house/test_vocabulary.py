"""The words of the glossary are in force: no house word of its second table stands in the product any more."""

import re

from tests.house.repository import PACKAGES, ROOT, texts

GLOSSARY = "orchestrator/GLOSSARY.md"

# Part of the API: names of event kinds. Part of a library: the argument of ``socket.create_server``.
KEPT = re.compile(r'"rank_refill"|backlog=')


def house_words() -> list[str]:
    """Return what the second table says no more."""
    table = (ROOT / GLOSSARY).read_text().rpartition("| before | now |")[2]
    rows = [row.split("|")[1] for row in table.splitlines() if row.startswith("| `")]
    return [word for row in rows for word in re.findall(r"`([^`]+)`", row)]


def found(word: str, text: str) -> list[str]:
    plural = "s?" if word.islower() else ""
    return re.findall(rf"\b{word.replace(' ', '[ _]')}{plural}\b", KEPT.sub("", text))


def test_no_house_word_stands_in_the_product() -> None:
    words = house_words()
    assert len(words) > 80
    product = {
        str(path): text
        for path, text in texts().items()
        if (path.parts[0] in {*PACKAGES, "deploy", "bench"} or str(path) == "README.md") and str(path) != GLOSSARY
    }
    assert len(product) > 200
    left = {f"{path}: {word}" for path, text in product.items() for word in words if found(word, text)}
    assert sorted(left) == []


def test_a_house_word_would_be_found() -> None:
    assert found("seat", "the seats of a deployment")
    assert found("state line", "heard on the state line")
    assert not found("seat", 'kind = "seated"')
    assert not found("refill", 'RANK_REPLACEMENT = "rank_refill"')
