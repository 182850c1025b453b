"""In what order the programs of a launch go on when it runs on the CPU (`gluon_on_cpu.py`): one that looks for trouble.

Only what passes between programs can show their order, so one may take another's place where it reads or writes such a
word, and nowhere else. Each has a rank: the first that is not known to wait in vain goes on, and now and then it is put
last. So some run as far ahead as the others let them, and some stand still where it hurts (Burckhardt et al., "A
randomized scheduler with probabilistic guarantees of finding bugs", 2010). The same seed gives the same order.
"""

import random
import threading
from collections.abc import Callable

IN_VAIN = 4
"""Looks after which a program waits for one that has still to write: no kernel looks so often unless it waits."""


class Turns:
    """Who runs, and who is next."""

    def __init__(self, programs: int, seed: int) -> None:
        self.random = random.Random(seed)
        self.ranks = self.random.sample(range(programs), programs)
        self.looks = [0] * programs
        self.gates = [threading.Semaphore(0) for _ in range(programs)]
        self.failure: BaseException | None = None

    def begin(self) -> None:
        """Let the first program run."""
        self.gates[self.ranks[0]].release()

    def run(self, program: int, body: Callable[[], None]) -> None:
        """Run a program when its first turn comes; when it ends, let another go on, or all end if it has failed."""
        self.gates[program].acquire()
        try:
            if self.failure is None:
                body()
        except BaseException as problem:  # a thread's own would be lost
            self.failure = self.failure or problem
        finally:
            self.ranks.remove(program)
            self._next()

    def news(self) -> None:
        """Say that there is something new to look at."""
        self.looks = [0] * len(self.looks)

    def pause(self, program: int, looks: bool = False) -> None:
        """Let another program run in this one's place, or not, before this one looks at a word or writes one."""
        self.looks[program] += looks
        if self.random.random() < 1 / 8:
            self.ranks.remove(program)
            self.ranks.append(program)
        self._next()
        self.gates[program].acquire()
        if self.failure is not None:
            raise self.failure

    def _next(self) -> None:
        able = [program for program in self.ranks if self.looks[program] < IN_VAIN]
        if self.ranks and not able and self.failure is None:
            self.failure = AssertionError("the programs wait for one another for ever")
        if self.ranks:
            self.gates[(able or self.ranks)[0]].release()
