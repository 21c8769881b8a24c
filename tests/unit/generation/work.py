"""A job of generation on files, with answers that are made up from the requests' numbers."""

import json

from mpispeed.generation.answers import EOS, ERROR, LENGTH, Answer, Answers
from mpispeed.generation.batches import cut
from mpispeed.generation.finished import Writer
from mpispeed.generation.identity import Identity
from mpispeed.generation.prompts import open_prompts


def words(number):
    """A text of as many words as its number says, with letters of two bytes."""
    return " ".join(["wört"] * (number % 7))


def job(tmp_path, count=20, batch_size=4, samples=1, **options):
    """Prompts, batches and identity of a job."""
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"id": f"q{n}", "prompt": words(n)}) + "\n" for n in range(count)))
    prompts = open_prompts(path, samples=samples)
    lengths = [len(prompt.content.split()) for prompt in prompts]
    batches = cut(lengths, 5, batch_size=batch_size, **options)
    identity = Identity(
        prompts.digest,
        batches.digest,
        "the model",
        {"temperature": 0.5},
        len(prompts),
        len(batches),
        len(batches.left_out),
    )
    return prompts, batches, identity


def answer(request, prompt_tokens=3):
    """The answer to a request."""
    if request % 11 == 10:
        return Answer(request, prompt_tokens, (), ERROR, error=f"request {request} failed")
    tokens = [request * 10 + place for place in range(request % 5)]
    return Answer(request, prompt_tokens, tokens, LENGTH if request % 5 == 4 else EOS, f"äntwort {request} " * 3)


def answers(batches, number):
    """The answers of a batch."""
    lengths = batches.lengths
    return Answers(number, tuple(answer(int(each), int(lengths[each])) for each in batches[number]), 0.25)


def finish(folder, identity, batches, numbers, start="start", group=0):
    """Put these batches on disk; returns the file."""
    folder.mkdir(exist_ok=True)
    with Writer(folder, identity, start=start, group=group) as writer:
        for number in numbers:
            writer.add(answers(batches, number))
        return writer.path
