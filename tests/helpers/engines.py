"""An engine without vLLM: at the other end of its pipe is the test."""

import multiprocessing
from types import SimpleNamespace

import ppo_sync
from helpers.rollouts import tiny_args


def engine_of_pipes(index=0, count=1):
    """A VLLM whose process is two pipes.

    What it is sent arrives at .theirs, which also takes (result, error, details) for an answer.
    .life.close() ends the process.
    """
    engine = ppo_sync.VLLM((), index, count, tiny_args())
    engine.connection, engine.theirs = multiprocessing.Pipe()
    sentinel, engine.life = multiprocessing.Pipe()
    engine.process = SimpleNamespace(join=lambda timeout: None, exitcode=-9, sentinel=sentinel)
    return engine
