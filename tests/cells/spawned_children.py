"""A function of the notebook, and a cell that calls it in spawned children."""


# %%
def square(number):
    return number * number


# %%
import multiprocessing

OFFSET = 5
print("the cell runs")


class Answer:
    def __init__(self, value):
        self.value = value


def load(number, answers):
    answers.put(Answer(square(number) + OFFSET))


print(multiprocessing.get_start_method(allow_none=True), multiprocessing.current_process().name)
multiprocessing.set_start_method("spawn")
context = multiprocessing.get_context()
answers = context.SimpleQueue()
children = [context.Process(target=load, args=(number, answers)) for number in (1, 2)]
for child in children:
    child.start()
print(sorted(answers.get().value for _ in children))
for child in children:
    child.join()
print([child.exitcode for child in children])
