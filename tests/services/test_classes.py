"""Service classes in the configuration: built in, added, and invalid."""

import pytest

from baton.services.classes import Classes
from baton.services.config import load
from baton.services.errors import ConfigError


def configured(folder, classes):
    file = folder / "baton.yaml"
    file.write_text(f"classes: {classes}\n")
    return Classes(load(config_file=str(file)).classes)


def test_two_classes_are_built_in_and_others_are_added(tmp_path):
    interactive, batch = Classes()
    assert (interactive.name, batch.name) == ("interactive", "batch")
    assert (interactive.room, batch.room) == (1.0, 0.75)  # the first one's share is kept free
    assert batch.preemptible
    added = configured(tmp_path, "{batch: {share: 0.2}, urgent: {priority: -5, patience_s: 0, share: 0.3}}")
    assert [(one.name, one.share, one.room) for one in added] == [
        ("urgent", 0.3, 1.0),
        ("interactive", 0.25, 0.7),
        ("batch", 0.2, 0.45),
    ]


@pytest.mark.parametrize(
    ("classes", "said"),
    [
        ("{night: {priority: 50, shar: 0.1}}", "unknown key 'classes.night.shar'; did you mean 'share'"),
        ("{night: {share: 0.1}}", "classes.night.priority is not allowed: Field required"),
        ("{night: {priority: 10}}", "classes: batch and night have the same priority"),
        ("{batch: {share: 0.8}}", "classes: the shares add up to more than 1 .1.05: interactive 0.25"),
        ("{batch: {share: 1}}", "classes.batch.share: value 1 is not allowed: Input should be less than 1"),
        ("{batch: {patience_s: 0}, interactive: {patience_s: 1}}", "batch goes after interactive"),
        ("{'Night shift': {priority: 5}}", "the name 'Night shift': use 1 to 32 of a-z"),
        (
            "{" + ", ".join(f"c{n}: {{priority: {n + 20}, share: 0.01}}" for n in range(15)) + "}",
            "17 classes are too many: 16",
        ),
    ],
)
def test_what_does_not_fit_together_is_refused(tmp_path, classes, said):
    with pytest.raises(ConfigError, match=said):
        configured(tmp_path, classes)
