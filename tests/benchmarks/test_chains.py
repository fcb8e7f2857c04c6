"""Variable chains: every answer is in the prompt, and a short training runs to the end."""

from __future__ import annotations

import json

import pytest
import torch

transformers = pytest.importorskip("transformers")
pytest.importorskip("rich")

from torch_cascade.benchmarks import chain_model, chain_task, chains  # noqa: E402
from torch_cascade.benchmarks import chain_task as task  # noqa: E402


def follow(statements, name):
    """The value at the end of a chain, and the statements on the way, by reading the prompt."""
    for hops in range(1, task.CHUNKS + 1):
        right = statements[name]
        if right >= task.NAMES:
            return right - task.NAMES, hops
        name = right
    raise AssertionError("the chain does not end")


def test_answers_are_found_by_following_the_chain():
    drawn = chain_task.draw(50, torch.Generator().manual_seed(5))
    assert drawn.ids.shape == (50, task.TOKENS) and int(drawn.ids.max()) < task.VOCABULARY
    for row in range(50):
        *chunks, questions = drawn.parts(row)
        statements, home = {}, {}
        for number, chunk in enumerate(chunks):
            left, right = (x.tolist() for x in task.sides(chunk))
            assert right[0] == task.SEPARATOR
            for name, value in zip(left[1:], right[1:], strict=True):
                assert name not in statements
                statements[name], home[name] = value, number
            pointers = [r for r in right[1:] if r < task.NAMES]
            assert len(pointers) == (task.POINTING if number else 0)
            assert all(home[r] == number - 1 for r in pointers)
        left, right = (x.tolist() for x in task.sides(questions))
        assert set(right) == {task.ASKING}
        for i, name in enumerate(left):
            value, hops = follow(statements, name)
            assert (value, hops) == (
                int(drawn.answers[row, task.CACHED + i]),
                int(drawn.hops[row, i]),
            )
            assert home[name] >= 1
        assert sorted(drawn.hops[row].tolist()) == [1, 1, 2, 2, 3, 3, 4, 4]


def test_the_trained_embedding_is_the_sum_of_its_sides():
    model = chain_model.train(seed=1, steps=2, batch=3)
    drawn = chain_task.draw(4, torch.Generator().manual_seed(2))
    table = model.get_input_embeddings().weight
    first, second = task.VALUES + 3 * task.RIGHT, task.VALUES + 5 * task.RIGHT
    torch.testing.assert_close(
        table[first + 7] - table[first + 9], table[second + 7] - table[second + 9]
    )
    assert model(drawn.ids).logits.shape == (4, task.TOKENS, task.VOCABULARY)
    assert not any(p.requires_grad for p in model.parameters()) and not model.training


def test_accuracy_counts_each_hop_by_itself():
    drawn = chain_task.draw(6, torch.Generator().manual_seed(3))
    answers = drawn.answers[:, task.CACHED :]
    wrong = torch.where(drawn.hops == 3, (answers + 1) % task.VALUES, answers)
    logits = torch.nn.functional.one_hot(wrong, task.VALUES).float()
    assert chain_model.accuracy(logits, drawn) == [1, 1, 0, 1]


def test_the_whole_command(tmp_path, monkeypatch):
    monkeypatch.setattr(chain_model, "LAYERS", 3)
    monkeypatch.setitem(chain_model.SIZES, "num_hidden_layers", 3)
    file, kept = tmp_path / "made.json", tmp_path / "model"
    asked = ["--prompts", "3", "--arms", "v", "gradual attention", "--ratios", "0.2"]
    new = ["--steps", "2", "--batch", "2", "--save", str(kept)]
    assert chains.main([*new, *asked, "--json", str(file)]) == 0
    made = json.loads(file.read_text())
    names = [line["arm"] for line in made["lines"]]
    assert names == ["eager", "reuse", "full", "v"]  # three layers have no room for a check at 3
    by_name = {line["arm"]: line["accuracy_by_hops"] for line in made["lines"]}
    assert by_name["eager"] == by_name["full"]
    assert made["dependent_share_of_cached_tokens"] == pytest.approx(6 / 36)
    again = chains.load(kept)
    drawn = chain_task.draw(2, torch.Generator().manual_seed(4))
    torch.manual_seed(0)
    same = chain_model.train(seed=0, steps=2, batch=2)
    assert torch.equal(again(drawn.ids).logits, same(drawn.ids).logits)
