"""Where a warp stands in a ring of shared-memory stages.

Each stage has two mbarriers, `full` and `empty`. Use n of the ring takes stage n % stages and waits for the phase of
parity n // stages % 2: the reader for that of `full`, the writer for the opposite one of `empty`, because a stage is
empty before its first use.
"""

from cutlass import Int32, const_expr
from cutlass import cute


class RingPosition:
    """A stage, and the parity of the phase to wait for there.

    Kernels carry it through dynamic loops and branches as they carry a number: the compiler asks for its values and
    rebuilds it from theirs. The position in a ring of one stage is the parity alone.
    """

    def __init__(self, stage, phase, stages):
        self.stage, self.phase, self.stages = stage, phase, stages

    @classmethod
    def of_reader(cls, stages):
        """Before the first use, for whoever waits for `full`."""
        return cls(Int32(0), Int32(0), stages)

    @classmethod
    def of_writer(cls, stages):
        """Before the first use, for whoever waits for `empty`: that wait does not block."""
        return cls(Int32(0), Int32(1), stages)

    def __extract_mlir_values__(self):
        values = (self.phase,) if self.stages == 1 else (self.stage, self.phase)
        return [Int32(value).ir_value() for value in values]

    def __new_from_mlir_values__(self, values):
        stage = Int32(0) if self.stages == 1 else Int32(values[0])
        return RingPosition(stage, Int32(values[-1]), self.stages)

    def copy(self):
        return RingPosition(self.stage, self.phase, self.stages)

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
        """The position of the next use; this one stays."""
        position = self.copy()
        position.advance()
        return position

    @cute.jit
    def stage_before(self):
        """The stage of the use before this one."""
        stage = self.stage - 1
        if self.stage == 0:
            stage = Int32(self.stages - 1)
        return stage
