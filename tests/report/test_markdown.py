"""Tables, blocks and numbers of Markdown: text of a run stays text, and what is not known is left out."""

from pipeline.report.markdown import cell, code, facts_table, filled_table, number, spread


def test_cells_and_code_blocks_survive_hostile_text():
    assert cell("a|b\nc\\") == "a\\|b<br>c\\\\"
    assert cell("<script>\x15") == "&lt;script>\\\\x15"
    assert cell("![a](b) *c* _d_ e_f `g` &lt;") == "![a]\\(b) \\*c\\* \\_d_ e_f \\`g\\` &amp;lt;"
    assert code("```\nx").startswith("````\n")


def test_numbers_keep_what_matters():
    assert [number(v) for v in (None, 0, 1234567, 1.23456789, 123456.7, 1e-5)] == [
        None,
        "0",
        "1,234,567",
        "1.235",
        "123,457",
        "1e-05",
    ]


def test_spread_keeps_the_first_and_the_last():
    assert spread(list(range(100)), 4) == [0, 33, 66, 99]
    assert spread([1, 2], 4) == [1, 2]


def test_a_table_leaves_out_columns_and_facts_that_nobody_knows():
    assert filled_table(["a", "b"], [[0, None], [None, None]]) == "| a |\n| --- |\n| 0 |\n| - |\n"
    assert filled_table(["a", "b"], [[None, None]]) == filled_table(["a", "b"], []) == ""
    assert facts_table("what", [["a", None], ["b", 0]]) == "| what | value |\n| --- | --- |\n| b | 0 |\n"
