"""The map of what requests pass through: it has its three stories, and is the same each time."""

import re

from tests.pages import life


def test_three_stories_the_same_each_time() -> None:
    stories = life.tell()
    page = life.page(stories)
    assert re.findall("^## (.*)$", page, re.MULTILINE) == [story.title for story in stories]
    split, death, prefix = stories
    assert {"gateway", "scheduler", "directory", "prefill", "decode"} == set().union(*split.steps.values())
    assert not split.new and death.new and prefix.new
    for story in stories:
        assert page.count(f"\n\n{story.counts}.\n") == 1
        assert all(place.file.split("/")[0] in life.ROOTS for place in story.steps)
        assert not any("<" in place.function or place.file.startswith(life.MEANS) for place in story.steps)
    assert life.page(life.tell()) == page
