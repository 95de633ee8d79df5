"""Which metadata are read before a text, and which values are no titles."""

import math

import pytest

from rsrank_rag.reading.documents import lines_before

TEXT = "Employees get 28 days of annual leave."


def read(title, text=TEXT):
    return lines_before(text, {"title": title}, ("title",))


# Written by PyPDFLoader (from the PDF's own title), and by pandas for an empty cell.
@pytest.mark.parametrize(
    "title",
    [
        "Microsoft Word - final_v3.docx",
        "Microsoft PowerPoint - Leave",
        "final_v3.pdf",
        r"C:\Users\ann\Desktop\leave (2).DOC",
        "untitled",
        "Untitled Document",
        "(anonymous)",
        "PowerPoint Presentation",
        "Document1",
        "Slide 1",
        "",
        " ",
        None,
        math.nan,
        "nan",
        "<NA>",
    ],
)
def test_what_programs_write_where_there_is_no_title_is_not_read(title):
    assert read(title) == ""


@pytest.mark.parametrize(
    "title", ["Annual leave", "Node.js", "Booking.com", "Documents", "U.S.A.", "Nancy", 1984]
)
def test_a_title_is_read_even_if_it_looks_a_little_like_a_file_name(title):
    assert read(title) == f"{title}\n"


def test_a_value_of_another_field_is_read_even_if_it_is_a_file_name():
    metadata = {"file_name": "leave.pdf", "page": math.nan}
    assert lines_before(TEXT, metadata, ("file_name", "page")) == "leave.pdf\n"


@pytest.mark.parametrize(
    ("title", "text", "expected"),
    [
        ("Bee", "Beekeeping is old.", "Bee\n"),
        ("Bee", "Bee: an insect.", ""),
        ("Bee", "Bee", ""),
        ("Do bees dance?", "Do bees dance? They do.", ""),
        ("C++ (language)", "C++ (language) is old.", ""),
    ],
)
def test_a_title_is_left_out_only_where_the_text_begins_with_the_same_words(title, text, expected):
    assert read(title, text) == expected


# What loaders wrote (langchain-community 0.4.2, llama-index-readers-file 0.7.0): for PDFs printed
# from Word, without a title, with one, and for files of Word, pandas and PowerPoint.
LOADED = [
    ({"source": "a.pdf", "title": "Microsoft Word - final_v3.docx", "page": 0}, ""),
    ({"source": "b.pdf", "title": "untitled", "page": 0, "page_label": "1"}, ""),
    ({"source": "c.pdf", "title": "", "author": "", "page": 0}, ""),
    ({"source": "d.pdf", "title": "Annual leave", "page": 0}, "Annual leave\n"),
    ({"source": "e.docx"}, ""),
    ({"source": "f.csv", "row": 0, "title": math.nan}, ""),
    ({"page_label": "1", "file_name": "a.pdf", "file_path": "/docs/a.pdf"}, ""),
    ({"file_name": "e.docx", "file_path": "/docs/e.docx"}, ""),
    ({"file_name": "g.pptx", "page_label": 1, "title": "Leave"}, "Leave\n"),
]


@pytest.mark.parametrize(("metadata", "expected"), LOADED)
def test_metadata_of_the_frameworks_loaders_give_titles_and_nothing_else(metadata, expected):
    assert lines_before(TEXT, metadata, ("title",)) == expected
