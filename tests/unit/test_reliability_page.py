"""docs/reliability.md says what the tests show, and nothing else."""

from tests.reliability import PAGE, page, rows


def test_the_page_is_what_the_tests_say() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run `make reliability`"


def test_no_row_is_said_twice() -> None:
    found = [row.what for row in rows()]
    assert len(found) > 20 and len(found) == len(set(found))
