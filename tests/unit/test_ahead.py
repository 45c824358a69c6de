"""Work that runs ahead in a forked process, and its results and errors. Each case has a process without threads."""

from __future__ import annotations

import subprocess
import sys
import textwrap

from maxtext_posttrain.ahead import run_ahead


def run(body: str) -> subprocess.CompletedProcess[str]:
  source = "import os, sys, time\nfrom maxtext_posttrain.ahead import run_ahead\n" + textwrap.dedent(body)
  return subprocess.run([sys.executable, "-c", source], text=True, capture_output=True, check=False, timeout=60)


def test_the_work_is_done_elsewhere_and_at_once():
  done = run(
    """
    started = time.perf_counter()
    collect = run_ahead(lambda: (time.sleep(1), os.getpid())[1])
    time.sleep(1)
    print(collect() != os.getpid(), time.perf_counter() - started < 1.8)
    """
  )
  assert done.stdout == "True True\n", done.stderr


def test_what_it_raises_is_raised_here_with_where_it_was_raised():
  done = run(
    """
    from maxtext_posttrain.errors import ConfigError
    def work():
      raise ConfigError(["one", "two"])
    try:
      run_ahead(work)()
    except ConfigError as error:
      print(error.problems, "in work" in error.__notes__[0])
    """
  )
  assert done.stdout == "['one', 'two'] True\n", done.stderr


def test_a_killed_process_is_an_error():
  done = run(
    """
    from maxtext_posttrain.errors import DataError
    try:
      run_ahead(lambda: os.kill(os.getpid(), 9))()
    except DataError as error:
      print(error)
    """
  )
  assert "ended without a result (exit code -9)" in done.stdout, done.stderr


def test_it_does_not_outlive_a_run_that_fails_meanwhile():
  done = run(
    """
    run_ahead(lambda: (time.sleep(1), os.write(1, b"still here")))
    sys.exit("failed")
    """
  )
  assert (done.stdout, done.stderr) == ("", "failed\n")


def test_beside_other_threads_it_is_done_on_demand():
  done = run(
    """
    import threading
    end = threading.Event()
    thread = threading.Thread(target=end.wait)
    thread.start()
    print(run_ahead(os.getpid)() == os.getpid())
    end.set()
    """
  )
  assert done.stdout == "True\n", done.stderr


def test_once_jax_is_there_it_is_done_on_demand():
  import jaxlib  # noqa: F401

  def work() -> int:
    return 1

  assert run_ahead(work) is work
