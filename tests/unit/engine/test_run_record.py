"""Warnings of the library become notes of the record."""

import logging

from mpispeed.engine.run_record import MOST_TEXT, WarningNotes


class Notes:
    """Keeps what a writer is told."""

    def __init__(self):
        self.found = []

    def note(self, kind, **values):
        self.found.append((kind, values))


def test_warnings_are_noted_and_a_wrong_call_of_the_log_ends_nothing(monkeypatch):
    monkeypatch.setattr(logging, "raiseExceptions", False)  # what it prints of the wrong call is logging's own
    notes, logger = Notes(), logging.Logger("mpispeed.part", logging.DEBUG)
    logger.addHandler(WarningNotes(notes))
    logger.info("left out")
    logger.warning("%d of %d", 1)
    logger.warning("%s", "x" * (MOST_TEXT + 1))
    assert notes.found == [("warning", {"level": "WARNING", "text": "x" * MOST_TEXT, "logger": "mpispeed.part"})]
