"""Where a warp stands in a ring of shared-memory stages.

Each stage has two mbarriers, `full` and `empty`. Use n of the ring takes stage n % stages. The reader waits for the phase of
`full` with parity n // stages % 2, the writer for the phase of `empty` with the opposite parity, because a stage is empty
before its first use.
"""

import cutlass.cute as cute
from cutlass import Int32, const_expr


class RingPosition:
    """A stage, and the parity of the phase to wait for there.

    A loop or branch of the device code carries the position where it assigns the name or calls a method of it: the DSL asks
    for the position's values and rebuilds it from others. So `advance` is for loops over a position of one's own. A function
    that moves a position on inside a loop or branch returns it, for its caller's object does not change.

    Args:
        stage: Int32. In a ring of one stage it is always 0, and the parity alone is carried.
        phase: Int32, 0 or 1.
        stages: int, of the ring.
    """

    def __init__(self, stage, phase, stages):
        self.stage, self.phase, self.stages = stage, phase, stages

    @classmethod
    def of_reader(cls, stages):
        """Before the first use, for a warp that waits for `full`."""
        return cls(Int32(0), Int32(0), stages)

    @classmethod
    def of_writer(cls, stages):
        """Before the first use, for a warp that waits for `empty`: its first waits do not block."""
        return cls(Int32(0), Int32(1), stages)

    def __extract_mlir_values__(self):
        values = (self.phase,) if self.stages == 1 else (self.stage, self.phase)
        return [Int32(value).ir_value() for value in values]

    def __new_from_mlir_values__(self, values):
        stage = Int32(0) if self.stages == 1 else Int32(values[0])
        return RingPosition(stage, Int32(values[-1]), self.stages)

    @cute.jit
    def advance(self):
        """Move on to the next use."""
        if const_expr(self.stages == 1):
            self.phase = self.phase ^ 1
        else:
            self.stage += 1
            if self.stage == self.stages:
                self.stage = Int32(0)
                self.phase = self.phase ^ 1

    def next(self):
        """The position of the next use; this one stays as it is."""
        position = RingPosition(self.stage, self.phase, self.stages)
        position.advance()
        return position

    @cute.jit
    def stage_before(self):
        """The stage of the use before this one."""
        stage = self.stage - 1
        if self.stage == 0:
            stage = Int32(self.stages - 1)
        return stage
