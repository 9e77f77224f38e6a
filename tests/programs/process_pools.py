"""multiprocessing's Pool, ProcessPoolExecutor and Manager with functions of the notebook."""

# %%
import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass


@dataclass
class Task:
    number: int

    def square(self):
        return self.number * self.number


OFFSET = 100


def work(task):
    return task.square() + OFFSET


def count(shared, lock, key):
    with lock:
        shared[key] = shared.get(key, 0) + 1


def start(value):
    global started
    started = value


def with_start(number):
    return started + number


# %% taas
if __name__ == "__main__":
    rank = os.environ["RANK"]
    tasks = [Task(i) for i in range(6)]
    with multiprocessing.Pool(2, initializer=start, initargs=(7,)) as pool:
        print(f"RESULT rank {rank} pool", pool.map(work, tasks), pool.map(with_start, range(3)))
    with ProcessPoolExecutor(2) as executor:
        print(f"RESULT rank {rank} executor", list(executor.map(work, tasks)))
    with multiprocessing.Manager() as manager:
        shared, lock = manager.dict(), manager.Lock()
        children = [
            multiprocessing.Process(target=count, args=(shared, lock, key))
            for key in ("a", "b", "a")
        ]
        for child in children:
            child.start()
        for child in children:
            child.join()
        print(f"RESULT rank {rank} manager", sorted(shared.items()), [c.exitcode for c in children])

# %% taas
if __name__ == "__main__":
    rank = os.environ["RANK"]
    for method in ("spawn", "forkserver"):
        context = multiprocessing.get_context(method)
        with context.Pool(1, initializer=start, initargs=(7,)) as pool:
            print(f"RESULT rank {rank} {method} pool", pool.map(work, [Task(3)]), end=" ")
            print(pool.map(with_start, range(2)))
        with ProcessPoolExecutor(1, mp_context=context) as executor:
            print(f"RESULT rank {rank} {method} executor", list(executor.map(work, [Task(4)])))
