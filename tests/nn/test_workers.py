"""Pieces of work done side by side by threads of Python."""

from __future__ import annotations

import multiprocessing
import threading

import pytest
import torch

from tenfold.nn import workers
from tenfold.nn.workers import work_off, workers_of


def test_every_piece_is_done_once_by_several_threads_at_a_time(threads):
    threads(3)
    together, done = threading.Barrier(3, timeout=30), []

    def work(piece):
        together.wait()  # passes only with three at it
        done.append((piece, threading.get_ident(), torch.get_num_threads(), torch.is_grad_enabled()))

    work_off(range(9), work, 3)
    assert sorted(piece for piece, *_ in done) == list(range(9))
    assert len({ident for _, ident, *_ in done}) == 3
    assert {(each, grad) for *_, each, grad in done} == {(1, False)}
    assert torch.get_num_threads() == 3


@pytest.mark.parametrize(("pieces", "count"), [(1, 4), (5, 1), (0, 4)])
def test_one_worker_or_piece_is_left_to_the_caller(threads, pieces, count):
    threads(4)
    idents = []
    work_off(range(pieces), lambda piece: idents.append(threading.get_ident()), count)
    assert idents == [threading.get_ident()] * pieces


def test_workers_are_as_many_as_threads_up_to_the_limit_and_then_get_several_each(threads, monkeypatch):
    monkeypatch.setattr(workers, "MOST_WORKERS", 2)
    threads(5)
    assert workers_of(torch.device("cpu")) == 2
    assert workers_of(torch.device("cuda")) == 1
    found = []
    work_off(range(4), lambda piece: found.append(torch.get_num_threads()), 2)
    assert found == [2] * 4


def test_a_thread_that_starts_later_has_the_callers_number_of_threads(threads):
    threads(4)
    work_off(range(4), lambda piece: None, 4)
    found = []
    thread = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    assert found == [4]


def test_an_error_is_raised_when_the_others_are_done(threads):
    threads(2)
    done = []

    def work(piece):
        if piece == 0:
            raise RuntimeError("piece 0")
        done.append(piece)

    with pytest.raises(RuntimeError, match="piece 0"):
        work_off(range(6), work, 2)
    assert sorted(done) == [1, 2, 3, 4, 5]


def _in_a_child(found):
    work_off(range(4), found.put, 2)


def test_a_forked_process_makes_threads_of_its_own(threads):
    threads(2)
    work_off(range(4), lambda piece: None, 2)
    context = multiprocessing.get_context("fork")
    found = context.Queue()
    child = context.Process(target=_in_a_child, args=(found,), daemon=True)
    child.start()
    assert sorted(found.get(timeout=30) for _ in range(4)) == [0, 1, 2, 3]
    child.join(30)
    assert child.exitcode == 0
