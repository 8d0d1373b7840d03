"""Which step of FlashKDA makes its output differ from the exact arithmetic in single elements? On a GPU, with flash_kda:

    python docs/lab/flashkda_one_element.py [heads tokens seed runs]

Runs FlashKDA several times on the same inputs and compares each run with the exact reference, bit for bit. For elements that
differ it prints the quantities that they are made of, and what FlashKDA gives where their head runs by itself. What that
says stands in flashkda_one_element.md.
"""

import sys

import torch

from fla_kda_backend.reference import exact

SCALE, LOWER_BOUND, SHOWN = 128**-0.5, -5.0, 4
HEAD_AXIS = {"q": 2, "k": 2, "v": 2, "g": 2, "beta": 2, "A_log": 0, "dt_bias": 0, "initial_state": 1}


def inputs(heads, tokens, seed):
    """The order of the draws fixes the values."""
    generator = torch.Generator("cuda").manual_seed(seed)
    options = {"generator": generator, "device": "cuda"}
    call = {name: torch.randn(1, tokens, heads, 128, **options).to(torch.bfloat16) for name in "qkvg"}
    call["beta"] = torch.randn(1, tokens, heads, **options).to(torch.bfloat16)
    call["A_log"], call["dt_bias"] = torch.rand(heads, **options), torch.rand(heads, 128, **options)
    return call | {"initial_state": torch.randn(1, heads, 128, 128, **options)}


def of_heads(call, first, end):
    return {name: x.narrow(HEAD_AXIS[name], first, end - first).contiguous() for name, x in call.items()}


def flashkda(call):
    import flash_kda

    out, state = torch.empty_like(call["v"]), torch.empty_like(call["initial_state"])
    q, k, v, g, beta = (call[name] for name in ("q", "k", "v", "g", "beta"))
    states = {"initial_state": call["initial_state"], "final_state": state}
    flash_kda.fwd(q, k, v, g, beta, SCALE, out, call["A_log"], call["dt_bias"], LOWER_BOUND, **states)
    torch.cuda.synchronize()
    return out, state


def reference(call):
    """Head by head: the workspace of all heads would not fit."""
    heads = call["q"].shape[2]
    parts = [exact.forward(**of_heads(call, h, h + 1), scale=SCALE, lower_bound=LOWER_BOUND) for h in range(heads)]
    return torch.cat([out for out, _ in parts], 2), torch.cat([state for _, state in parts], 1)


def bits(x):
    return x.contiguous().view(torch.int16).int()


def word_of(x):
    """The 16 bits of one bf16."""
    return int(bits(x.reshape(1))) & 0xFFFF


def tokens_of(call, first, end):
    return {name: x[:, first:end].contiguous() if HEAD_AXIS[name] == 2 else x for name, x in call.items()}


def terms(call, token, head, column):
    """What output [0, token, head, column] is made of, by the reference: name -> bf16."""
    one, first, row = of_heads(call, head, head + 1), token - token % 16, token % 16
    math, bf16 = exact._math_for(one["q"].device), torch.bfloat16
    state = one["initial_state"]
    if first:
        _, state = exact.forward(**tokens_of(one, 0, first), scale=SCALE, lower_bound=LOWER_BOUND)
    now = tokens_of(one, first, first + 16) | {"initial_state": state}
    *_, tables = exact.forward(**now, scale=SCALE, lower_bound=LOWER_BOUND, return_workspace=True)
    s = state.to(bf16)[0].mT  # [1, K, V]; the state is bf16 as it is
    v, beta = now["v"][:, :, 0], exact.sigmoid(math, now["beta"].float()).to(bf16)  # [1, 16, V], [1, 16, 1]
    read = math.product(tables["k_start"], s).to(bf16)
    u = math.product(tables["inverse"], (v - read) * beta).to(bf16)
    from_state, inside = (math.product(tables[a], b)[0, row, column] for a, b in (("q_start", s), ("scores", u)))
    scores, u = tables["scores"][0, row], u[0, :, column]
    found = {
        "O1": from_state.to(bf16),
        "scores U": inside.to(bf16),
        "scores U in double precision": (scores.double() @ u.double()).to(bf16),
        "O1 + scores U": from_state.to(bf16) + inside.to(bf16),
        "O1 + scores U, rounded once": (from_state + inside).to(bf16),
        "O1 - scores U": from_state.to(bf16) - inside.to(bf16),
    }
    for j in range(row + 1):
        found[f"scores[{j}]"], found[f"U[{j}]"] = scores[j], u[j]
    return found


def main(heads=48, tokens=16_384, seed=1053, runs=20):
    call = inputs(heads, tokens, seed)
    wanted, wanted_state = reference(call)
    places = {}
    for run in range(runs):
        out, state = flashkda(call)
        where = (bits(out) != bits(wanted)).nonzero().tolist()
        print(f"run {run}: {len(where)} outputs differ, state equal: {torch.equal(state, wanted_state)}", flush=True)
        for place in where:
            places.setdefault(tuple(place), {})[run] = word_of(out[tuple(place)])
    for place, seen in list(places.items())[:SHOWN]:
        _, token, head, column = place
        ours = word_of(wanted[place])
        print(f"\n{place}: ours {ours:#06x}; in {len(seen)} of {runs} runs FlashKDA has {sorted(map(hex, set(seen.values())))}")
        alone = flashkda(of_heads(call, head, head + 1))[0]
        print(f"  its head by itself: {word_of(alone[0, token, 0, column]):#06x}")
        for name, x in terms(call, token, head, column).items():
            word = word_of(x)
            same = "   = FlashKDA" * (word in seen.values()) + "   = ours" * (word == ours)
            print(f"  {name:30s} {word:#06x} {float(x): .6e}{same}")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
