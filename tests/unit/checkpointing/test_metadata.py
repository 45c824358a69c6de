"""What a checkpoint says of itself, and what is said where it can't."""

from maxtext_posttrain.checkpointing.metadata import reason


def test_a_long_reason_keeps_its_ends_and_what_the_system_said():
  error = ValueError("OUT_OF_RANGE: begin " + "x" * 400 + " [os_error_code='27'] " + "y" * 400 + " end")
  text = reason(error)
  assert text.startswith("ValueError: File too large: OUT_OF_RANGE: begin xxx")
  assert text.endswith("yyy end")
  assert len(text) < 330


def test_a_short_reason_is_the_exception_on_one_line():
  assert reason(KeyError("a\n b")) == "KeyError: 'a\\n b'"
  assert reason(OSError()) == "OSError"
