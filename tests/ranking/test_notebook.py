"""How a notebook shows results and explanations."""

import re
from dataclasses import replace

from rsrank_rag import Explanation, Reranker


class Numbers(Reranker):
    def score(self, query, documents):
        return [float(text.split()[0]) for text in documents]


def test_a_result_is_a_table_with_a_row_for_each_document_best_first():
    documents = ["-1 no", {"text": "2 <script>x</script> & more", "id": "<b>"}]
    shown = Numbers().rank("a < b?", documents)._repr_html_()
    rows = re.findall("<tr.*?</tr>", shown)
    cells = [re.findall("<td.*?>(.*?)</td>", row) for row in rows]
    assert cells == [
        [],
        ["+", "+2.00", "&lt;b&gt;", "2 &lt;script&gt;x&lt;/script&gt; &amp; more"],
        ["-", "-1.00", "0", "-1 no"],
    ]
    assert "a &lt; b?" in shown
    # Pale instead of grey, which is hard to read on dark pages.
    assert ["opacity: 0.6" in row for row in rows] == [False, False, True]
    assert "color:" not in shown


def test_an_explanation_marks_the_words_that_raise_and_lower_the_score():
    explanation = Explanation(
        query="where <flowers>",
        document="Flowers & bees",
        score=0.5,
        truncated=False,
        tokens=("where", "<flowers>"),
        layers=(1,),
        parts=((-0.25,), (0.75,)),
        head_parts=(((-0.25,),), ((0.75,),)),
    )
    shown = explanation._repr_html_()
    marks = re.findall(r'<span title="(.*?)" style="background: rgba\((.*?)\)">(.*?)</span>', shown)
    assert marks == [
        ("-0.250", "220, 40, 40, 0.20", "where"),
        ("+0.750", "0, 160, 60, 0.60", "&lt;flowers&gt;"),
    ]
    assert "<b>+0.50</b> Flowers &amp; bees</p>" in shown
    window = replace(explanation, similarity_window=(10, 14))._repr_html_()
    assert "<b>+0.50</b> bees</p>" in window
