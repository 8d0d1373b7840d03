"""Which kernel a call runs on, with which parameters, and whether it should. Pure metadata."""

from typing import NamedTuple

BV_CHOICES = (32, 64, 128)
V_DIM = 128


class Plan(NamedTuple):
    """`kernel` and `options` name the compiled variant, `grid` its recurrence's CTAs; `reason`: why should_run is False."""

    kernel: str  # "column_split"
    options: tuple[tuple[str, object], ...]  # compile-time options that depend on shapes and mode
    grid: int
    should_run: bool = True
    reason: str = ""

    @property
    def params(self):
        """What the dispatch log shows."""
        return {**dict(self.options), "grid": self.grid}


def plan(call, facts):
    """The Plan of an eligible call."""
    return column_split("exact" if facts.mode == "exact" else "robust", call.num_sequences, call.heads, facts.sm_count)


def column_split(arithmetic, num_sequences, heads, sm_count):
    """The 16-token kernels: fewest value columns a CTA that still fit one CTA on each SM."""
    tasks = num_sequences * heads
    bv = next((bv for bv in BV_CHOICES if tasks * (V_DIM // bv) <= sm_count), BV_CHOICES[-1])
    return Plan(
        "column_split",
        (("arithmetic", arithmetic), ("bv", bv), ("warps", warps(arithmetic, bv))),
        tasks * (V_DIM // bv),
    )


def warps(arithmetic, bv):
    """Compute warps of a CTA: a full-width fp32 state does not fit the registers of four."""
    return 8 if arithmetic == "robust" and bv == 128 else 4
