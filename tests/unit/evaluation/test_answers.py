"""The final number of a solution: values worked by hand, and GSM8K's own format."""

from __future__ import annotations

import time
from fractions import Fraction

import pytest

from maxtext_posttrain.evaluation.answers import find_answer, parse_number

NUMBERS = [
  ("42", 42),
  ("  42 ", 42),
  ("42.", 42),
  ("18.00", 18),
  ("007", 7),
  (".5", Fraction(1, 2)),
  ("0.125", Fraction(1, 8)),
  ("1,234", 1234),
  ("1,234,567.5", Fraction(2469135, 2)),
  ("1\u202f234", 1234),
  ("1{,}234", 1234),
  (r"1,\!234", 1234),
  (r"10\,000", 10000),
  ("-5", -5),
  ("\u22125", -5),
  ("- 5", -5),
  ("+5", 5),
  ("$18", 18),
  ("$ 18", 18),
  ("-$18", -18),
  ("$-18", -18),
  (r"\$18", 18),
  ("£1,000", 1000),
  ("18€", 18),
  ("50%", 50),
  (r"50\%", 50),
  ("50 percent", 50),
  ("3/4", Fraction(3, 4)),
  ("3 / 4", Fraction(3, 4)),
  ("-3/4", Fraction(-3, 4)),
  ("36/2", 18),
  ("1.5/3", Fraction(1, 2)),
  ("1 1/2", Fraction(3, 2)),
  ("-1 1/2", Fraction(-3, 2)),
  (r"\frac{3}{4}", Fraction(3, 4)),
  (r"\dfrac{3}{4}", Fraction(3, 4)),
  (r"\frac34", Fraction(3, 4)),
  (r"-\frac{1}{2}", Fraction(-1, 2)),
  (r"\frac{-1}{2}", Fraction(-1, 2)),
  (r"1\frac{1}{2}", Fraction(3, 2)),
  ("1e3", 1000),
  ("1.5E-2", Fraction(3, 200)),
  ("$42$", 42),
  (r"\(42\)", 42),
  ("**42**", 42),
  ("`42`", 42),
  ("x = 5", 5),
  ("x=-5", -5),
  ("18 dollars", 18),
  ("18 dollars per hour.", 18),
  ("60 km/h", 60),
  ("25 cm^2", 25),
  ("25 cm²", 25),
  (r"5 \text{ cm}^2", 5),
  (r"5\text{ m}", 5),
  (r"\text{5}", 5),
  (r"90^\circ", 90),
  ("90°", 90),
  ("20°C", 20),
]

NOT_NUMBERS = [
  "",
  " ",
  "x",
  "2x",
  "x^2 + 1",
  "5, 7",
  "(3, 4)",
  "10 + 5",
  "5 and 6",
  r"3\sqrt{2}",
  r"5\pi",
  "3/0",
  "1.2.3",
  "12,34",
  "forty-two",
  "the answer is 42",
  "9" * 61,
  "1e100",
  "-",
  "$",
  "٤٢",
]


@pytest.mark.parametrize(("text", "value"), NUMBERS)
def test_a_number_in_its_dress(text: str, value: Fraction | int):
  assert parse_number(text) == value


@pytest.mark.parametrize("text", NOT_NUMBERS)
def test_what_is_no_number(text: str):
  assert parse_number(text) is None


SOLUTIONS = [
  # GSM8K: the number after the last ####.
  ("48/2 = <<48/2=24>>24 clips.\n#### 24", 24, "24", "####"),
  ("#### 1,234", 1234, "1,234", "####"),
  ("####-7", -7, "-7", "####"),
  ("#### $18.00 in all", 18, "$18.00", "####"),
  ("#### 3\nNo, wait.\n#### 4", 4, "4", "####"),
  ("#### **42**", 42, "42", "####"),
  (r"#### \frac{1}{2}", Fraction(1, 2), "1/2", "####"),
  # Headings are none.
  ("#### 1. Understand\nWe need 9.\n#### Answer\nIt is 12", 12, "12", "last number"),
  ("##### 7\nso 8", 8, "8", "last number"),
  # MATH: the last box that is closed; of both marks the later one.
  (r"so \boxed{7}", 7, "7", "boxed"),
  (r"\boxed{1}, no, \boxed{2} by 3", 2, "2", "boxed"),
  (r"\boxed{\frac{3}{4}}", Fraction(3, 4), r"\frac{3}{4}", "boxed"),
  (r"\fbox{3} \boxed {5}", 5, "5", "boxed"),
  (r"\boxed{\text{5}}", 5, r"\text{5}", "boxed"),
  (r"\boxed{4} #### 5", 5, "5", "####"),
  (r"#### 5 is \boxed{4}", 4, "4", "boxed"),
  (r"\boxed{3} or \boxed{4", 3, "3", "boxed"),
  (r"it is 12, \boxed{13", 13, "13", "last number"),
  # The last number.
  ("She has 3 and 4, which is 7 apples.", 7, "7", "last number"),
  ("The total is $1,234.50.", Fraction(2469, 2), "$1,234.50", "last number"),
  ("10-5", 5, "5", "last number"),
  ("10 - 5", 5, "5", "last number"),
  ("(2)-5", 5, "5", "last number"),
  ("it fell to -5.", -5, "-5", "last number"),
  ("it fell to -$5.", -5, "-$5", "last number"),
  ("- 5 apples", 5, "5", "last number"),
  ("it is 3/4 of it", Fraction(3, 4), "3/4", "last number"),
  ("12,3456", 3456, "3456", "last number"),
  ("3,4", 4, "4", "last number"),
  ("an area of 25 cm^2", 25, "25", "last number"),
  (r"an area of 25 \text{ cm}^{2}", 25, "25", "last number"),
  ("<<2*3=6>>6.", 6, "6", "last number"),
]

WITHOUT = ["", "No number here.", "####", "#### none", r"\boxed{x + 1} from 5 and 6", "3/0", "9" * 100]


@pytest.mark.parametrize(("solution", "value", "text", "rule"), SOLUTIONS)
def test_the_final_number(solution: str, value: Fraction | int, text: str, rule: str):
  answer = find_answer(solution)
  assert answer is not None
  assert (answer.value, answer.text, answer.rule) == (value, text, rule)


@pytest.mark.parametrize("solution", WITHOUT)
def test_a_solution_without_one(solution: str):
  assert find_answer(solution) is None


@pytest.mark.parametrize(
  ("solution", "value"),
  [("#### 4", 4), (r"\boxed{4}", 4), ("4", 4), (" $4. ", 4), ("It is 4.", None), ("4 or 5", None), ("", None)],
)
def test_only_what_is_marked(solution: str, value: int | None):
  answer = find_answer(solution, marked_only=True)
  assert (None if answer is None else answer.value) == value


@pytest.mark.parametrize(
  ("solution", "reference", "same"),
  [
    ("It costs $18.00.", "#### 18", True),
    (r"\boxed{0.75}", r"\boxed{\frac{3}{4}}", True),
    ("1,000", "#### 1000", True),
    ("50%", "#### 50", True),
    ("0.333", "1/3", False),
    ("-5", "#### 5", False),
    ("18", "#### 180", False),
    ("nothing", "nothing", False),
  ],
)
def test_the_same_answer(solution: str, reference: str, same: bool):
  found, wanted = find_answer(solution), find_answer(reference)
  assert (found is not None and wanted is not None and found.value == wanted.value) is same


@pytest.mark.parametrize(
  "piece",
  ["1", "-", "####", r"\boxed{", "{", r"\boxed{1}", "1,234", "ab ", "1 ", r"\frac{1", r"\text{a", "a=", "#### x"],
)
def test_text_made_to_take_long_does_not(piece: str):
  text = "5 " + piece * (200_000 // len(piece))
  # Processor time, so that a busy machine fails nothing.
  started = time.process_time()
  find_answer(text)
  parse_number(text)
  assert time.process_time() - started < 2
