"""The examples of docs/rules.md are run."""

import doctest
import re
from pathlib import Path

TEXT = (Path(__file__).parents[1] / "docs" / "rules.md").read_text()


def test_the_examples_of_the_rules_page_hold():
    code = "\n".join(re.findall(r"```python\n(.*?)```", TEXT, re.S))
    example = doctest.DocTestParser().get_doctest(code, {}, "rules.md", "docs/rules.md", 0)
    assert len(example.examples) > 5
    assert doctest.DocTestRunner().run(example).failed == 0
