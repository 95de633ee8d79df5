"""Texts of other languages than a WordPiece vocabulary's: one warning, and none for English."""

import pytest

from rsrank_rag import RSRank

ENGLISH = [
    "The warranty covers defects for two years from the date of purchase.",
    "Receipts reach accounting by the 5th; mileage is paid at 45p (see tmux-3.4, Reykjavik, Zstd).",
    "Acetylsalicylic acid inhibits cyclooxygenase in thrombocytes, said Dr Wojciechowski.",
]
FOREIGN = {
    "German": "Die Garantie deckt Mängel für zwei Jahre ab dem Kaufdatum, sofern das Gerät "
    "sachgemäß verwendet wurde. Der Beleg ist aufzubewahren.",
    "French": "La garantie couvre les défauts pendant deux ans à compter de la date d'achat, à "
    "condition que l'appareil ait été utilisé correctement.",
    "Polish": "Gwarancja obejmuje wady przez dwa lata od daty zakupu, pod warunkiem prawidłowego "
    "użytkowania urządzenia.",
    "Chinese": "保修期为自购买之日起两年，前提是设备使用正确，" * 2,
    "Hindi": "वारंटी खरीद की तारीख से दो साल तक दोषों को कवर करती है, " * 2,
}
WARNING = "are not in the model's vocabulary"


@pytest.fixture
def mini():
    return RSRank.from_pretrained("mini", device="cpu")


@pytest.mark.parametrize("language", FOREIGN)
def test_passages_of_another_language_give_one_warning(mini, language, caplog):
    for _ in range(2):
        mini.rank("How long is the warranty?", [" ".join([FOREIGN[language]] * 4)])
    assert caplog.text.count(WARNING) == 1
    assert "Most words of the documents" in caplog.text


def test_short_queries_of_another_language_give_one_warning_together(mini, caplog):
    queries = ["Wie lange gilt die Garantie?", "Wo finde ich den Beleg?", "Urlaubstage im Jahr"]
    for query in queries * 6:
        mini.rank(query, ENGLISH)
    assert caplog.text.count(WARNING) == 1
    assert "Most words of the queries" in caplog.text


def test_english_with_names_numbers_and_terms_gives_no_warning(mini, caplog):
    for text in ENGLISH * 6:
        mini.rank(text, ENGLISH)
    assert WARNING not in caplog.text


def test_byte_level_vocabularies_are_not_checked(ranker, caplog):
    ranker.rank(FOREIGN["Polish"], [text * 4 for text in FOREIGN.values()])
    assert WARNING not in caplog.text
