"""Runs a kernel's own Python on the CPU, without the DSL: interprets its PTX, and looks for races in shared memory.

A value of a thread is an array over the 32 lanes of its warp (`Lanes`); a warp is a thread of Python. `install` puts a stand-in
for `cutlass` into sys.modules, so its process can no longer compile. The text that ptx.py hands to LLVM is executed by `Ptx`.
WGMMA and tensor-map loads have no such text: who emulates a kernel computes them, with `Machine.read_matrix` and
`Machine.copy`.

Races: every warp and every mbarrier's copies have a vector clock. An access of a word must come after the word's last write, a
write also after all reads, by a chain of barriers, mbarriers or (between lanes of a warp) sync_warp. What the copy engine
overwrites and what WGMMA reads must have been fenced by the thread that wrote it.

Branches that only some lanes take: an `if` without `else` is run with the other lanes masked, see `Masked`; so its body may
store, and may not assign what is used after it.
"""

import ast
import contextlib
import importlib.machinery
import importlib.util
import re
import sys
import threading
import types
from pathlib import Path

import numpy as np

LANES = np.arange(32)
BARRIER_TIMEOUT = 300  # s


# ---- values ------------------------------------------------------------------------------------------------------------
class Lanes(np.ndarray):
    """A value of the 32 lanes of a warp."""

    def ir_value(self, **_):
        return self

    def one(self):
        """The value that all active lanes have."""
        active = np.asarray(self)[here.mask]
        assert (active == active[0]).all(), "lanes of a warp go different ways"
        return active[0].item()

    def __bool__(self):
        return bool(self.one())

    def __int__(self):
        return int(self.one())

    __index__ = __int__

    # never in place: values are shared
    __iadd__, __isub__, __imul__ = np.ndarray.__add__, np.ndarray.__sub__, np.ndarray.__mul__


def lanes(x, dtype):
    if isinstance(x, np.ndarray) and x.ndim:
        return x.astype(dtype, copy=False).view(Lanes)
    return np.full(32, x, dtype).view(Lanes)


class _Scalar(type):
    def __instancecheck__(cls, x):
        return isinstance(x, Lanes) and x.dtype == cls.dtype

    def __call__(cls, x):
        if cls.dtype == np.int32 and not isinstance(x, np.ndarray):
            x = (int(x) & 0xFFFFFFFF) - ((int(x) & 0x80000000) << 1)
        return lanes(x, cls.dtype)


class Float32(metaclass=_Scalar):
    dtype, width = np.dtype(np.float32), 32


class Int32(metaclass=_Scalar):
    dtype, width = np.dtype(np.int32), 32


class Int64(metaclass=_Scalar):
    dtype, width = np.dtype(np.int64), 64


class BFloat16:
    width = 16


class Pointer:
    """An address of shared memory and the size of what it points to."""

    def __init__(self, at, size):
        self.at, self.size = at, size

    def __add__(self, count):
        return Pointer(self.at + int(count) * self.size, self.size)

    def toint(self):
        return Int32(self.at)


class Registers:
    """A tensor in registers: values by their number, or by indices (4 values, number)."""

    layout = None

    def __init__(self, values):
        self.iterator = values

    def _number(self, at):
        return at[0] + 4 * at[1] if isinstance(at, tuple) else int(at)

    def __getitem__(self, at):
        if isinstance(at, tuple) and at[0] is None:  # words of an operand's k-block
            return self.iterator[4 * at[2] : 4 * at[2] + 4]
        return self.iterator[self._number(at)]

    def __setitem__(self, at, value):
        self.iterator[self._number(at)] = value


def widened(words):
    """(low, high) of bf16 pairs as fp32."""
    words = np.asarray(words).view(np.uint32)
    return (words << 16).view(np.float32), (words & np.uint32(0xFFFF0000)).view(np.float32)


def bf16_bits(x):
    """Bits of x rounded to bf16, nearest even."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    return np.where(np.isnan(x), 0x7FFF, (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint32)


# ---- the machine -------------------------------------------------------------------------------------------------------
class _Here(threading.local):
    """What the running warp is: its number, and the lanes that take part."""

    warp = 0
    mask = np.ones(32, bool)


here = _Here()


class Masked:
    """Runs the body of an `if` for the lanes whose condition holds: `for _ in Masked(condition)`."""

    def __init__(self, condition):
        self.condition = condition

    def __iter__(self):
        outer, condition = here.mask, self.condition
        here.mask = outer & (np.asarray(condition) if isinstance(condition, Lanes) else np.full(32, bool(condition)))
        if here.mask.any():
            yield
        here.mask = outer


def loop(*bounds, **_):
    """cutlass.range; the first value may differ between lanes, where the body stores alone."""
    if not (len(bounds) > 1 and isinstance(bounds[0], Lanes) and len(set(np.asarray(bounds[0]).tolist())) > 1):
        yield from range(*(int(x) for x in bounds))
        return
    at, end, step = bounds[0], int(bounds[1]), int(bounds[2]) if len(bounds) > 2 else 1
    outer = here.mask
    while (outer & np.asarray(at < end)).any():
        here.mask = outer & np.asarray(at < end)
        yield at
        at = at + step
    here.mask = outer


class Machine:
    """One CTA after the other: shared and global memory, barriers, clocks.

    Args:
        warps: of a CTA.
        shared: bytes of shared memory.
        memory: global memory, an array of bytes.
    """

    COPIES = 8  # mbarriers with copies of their own clock

    def __init__(self, warps, shared, memory):
        self.warps, self.memory = warps, memory
        self.shared = np.full(shared, 0xFF, np.uint8)  # NaN
        words, agents = shared // 4, warps + self.COPIES
        self.writer, self.written = np.full(words, -1), np.zeros(words, np.int32)
        self.write_lane, self.write_epoch = np.full(words, -1), np.zeros(words, np.int32)
        self.read = np.zeros((words, agents), np.int32)
        self.read_lane, self.read_epoch = np.full((warps, words), -2), np.zeros((warps, words), np.int32)
        self.clock, self.fenced = np.eye(agents, dtype=np.int32), np.zeros((agents, agents), np.int32)
        self.epoch = np.zeros(warps, np.int32)
        self.pending = [[] for _ in range(warps)]  # words that WGMMAs read
        self.everyone = threading.Barrier(warps, lambda: self._join(range(warps)))
        self.named, self.mbarriers = {}, {}
        self.changed, self.turn = threading.Condition(), threading.Lock()
        self.failures, self.where = [], {}

    # ---- order
    def _join(self, warps):
        for clocks in self.clock, self.fenced:
            clocks[list(warps)] = clocks[list(warps)].max(0)
        for w in warps:
            self._tick(w)

    def _tick(self, w):
        self.clock[w, w] += 1
        self.epoch[w] += 1

    @contextlib.contextmanager
    def _waiting(self):
        """One warp runs at a time, until it waits: threads that compete for the interpreter's lock are slow."""
        self.turn.release()
        try:
            yield
        finally:
            self.turn.acquire()

    def sync_threads(self):
        with self._waiting():
            self.everyone.wait(BARRIER_TIMEOUT)

    def barrier(self, barrier_id, number_of_threads):
        number = int(barrier_id)
        group = [w for w in range(self.warps) if w // 4 == here.warp // 4]  # warpgroups alone
        assert number_of_threads == 128
        with self.changed:
            key = number, here.warp // 4
            if key not in self.named:
                self.named[key] = threading.Barrier(4, lambda: self._join(group))
        with self._waiting():
            self.named[key].wait(BARRIER_TIMEOUT)

    def sync_warp(self):
        self.epoch[here.warp] += 1

    def fence(self):
        self.fenced[here.warp, here.warp] = self.clock[here.warp, here.warp]
        self._tick(here.warp)

    # ---- mbarriers; each completes with one arrival and the bytes that it announces
    def mbarrier(self, at):
        return self.mbarriers.setdefault(
            int(at), {"phase": 0, "bytes": 0, "arrived": False, "agent": self.warps + len(self.mbarriers)}
        )

    def expect(self, at, count):
        b = self.mbarrier(at)
        assert not b["arrived"], "a second arrival in a phase"
        b["arrived"], b["bytes"] = True, b["bytes"] + int(count)
        self._complete(b)

    def _complete(self, b):
        if b["arrived"] and b["bytes"] == 0:
            with self.changed:
                b["phase"], b["arrived"] = b["phase"] + 1, False
                self.changed.notify_all()

    def wait(self, at, parity):
        b = self.mbarrier(at)
        with self._waiting(), self.changed:
            assert self.changed.wait_for(lambda: b["phase"] & 1 != int(parity), BARRIER_TIMEOUT), "an mbarrier never completes"
        for clocks in self.clock, self.fenced:
            clocks[here.warp] = np.maximum(clocks[here.warp], clocks[b["agent"]])
        self._tick(here.warp)

    def copy(self, to, data, at):
        """A copy of bytes into shared memory that completes on the mbarrier at an address."""
        b, w = self.mbarrier(at), here.warp
        agent = b["agent"]
        for clocks in self.clock, self.fenced:
            clocks[agent] = np.maximum(clocks[agent], clocks[w])
        self.clock[agent, agent] += 1
        self.fenced[agent, agent] = self.clock[agent, agent]
        self._tick(w)
        words = np.arange(to // 4, (to + len(data)) // 4)
        known = self.fenced[agent].copy()
        known[agent] = self.clock[agent, agent]
        self._after_writes(words, known, "a copy over what was written")
        self._after_reads(words, self.clock[agent], "a copy over what was read")
        self.writer[words], self.written[words], self.write_lane[words] = agent, self.clock[agent, agent], -1
        self.shared[to : to + len(data)] = data
        b["bytes"] -= len(data)
        self._complete(b)

    # ---- races
    def _fail(self, what, words):
        if len(self.failures) < 20:
            frames, frame = [], sys._getframe(2)
            while frame and len(frames) < 6:
                if "kernels/" in frame.f_code.co_filename and not frame.f_code.co_filename.endswith("ptx.py"):
                    frames.append(f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}")
                frame = frame.f_back
            byte = int(words[0]) * 4
            self.failures.append(f"{what}: warp {here.warp}, byte {byte} of shared memory, at {' < '.join(frames)}")

    def _after_writes(self, words, known, what):
        writer = self.writer[words]
        wrong = (writer >= 0) & (self.written[words] > known[writer])
        if wrong.any():
            self._fail(what, words[wrong])

    def _after_reads(self, words, known, what, but=None):
        late = self.read[words] > known
        if but is not None:
            late[:, but] = False
        if late.any():
            self._fail(what, words[late.any(1)])

    def _loaded(self, words, lane):
        w, clock = here.warp, self.clock[here.warp]
        self._after_writes(words, clock, "read before it is written")
        other = (self.writer[words] == w) & (self.write_epoch[words] == self.epoch[w]) & (self.write_lane[words] != lane)
        if other.any():
            self._fail("read what another lane wrote, without sync_warp", words[other])
        self.read[words, w] = clock[w]
        again = (self.read_epoch[w, words] == self.epoch[w]) & (self.read_lane[w, words] != lane)
        self.read_lane[w, words] = np.where(again, -1, lane)
        self.read_epoch[w, words] = self.epoch[w]

    def _stored(self, words, lane):
        w, clock = here.warp, self.clock[here.warp]
        self._after_writes(words, clock, "written over what another warp wrote")
        self._after_reads(words, clock, "written over what another warp reads", but=w)
        mine = (self.writer[words] == w) & (self.write_epoch[words] == self.epoch[w]) & (self.write_lane[words] != lane)
        read = (self.read_epoch[w, words] == self.epoch[w]) & (self.read_lane[w, words] != lane) & (self.read[words, w] > 0)
        if (mine | read).any():
            self._fail("written over what another lane wrote or read, without sync_warp", words[mine | read])
        self.writer[words], self.written[words] = w, clock[w]
        self.write_lane[words], self.write_epoch[words] = lane, self.epoch[w]

    def read_matrix(self, start, count):
        """Bytes of shared memory that a WGMMA of this warp reads until `wait_group`."""
        words = np.arange(start // 4, (start + count) // 4)
        known = np.where(np.arange(len(self.clock)) < self.warps, self.fenced[here.warp], self.clock[here.warp])
        self._after_writes(words, known, "WGMMA reads what was not fenced, or not written yet")
        self.read[words, here.warp] = self.clock[here.warp, here.warp]
        self.pending[here.warp].append(words)
        return self.shared[start : start + count]

    def wait_group(self, count):
        w = here.warp
        if count == 0:
            for words in self.pending[w]:
                self._after_writes(words, self.clock[w], "written while a WGMMA reads it")
                self.read[words, w] = self.clock[w, w]
            self.pending[w].clear()

    # ---- memory
    def load(self, space, address, size, count):
        """`count` values of `size` bytes of each lane, as unsigned integers."""
        mask, at = here.mask, np.asarray(address).astype(np.int64)
        at = np.where(mask, at, at[mask][0])
        assert (at % (size * count) == 0).all(), "not aligned"
        bytes_at = at[:, None] + np.arange(size * count)
        if space == "shared":
            words = (at[:, None] >> 2) + np.arange(max(size * count // 4, 1))
            self._loaded(words[mask].reshape(-1), np.repeat(LANES[mask], words.shape[1]))
        data = (self.shared if space == "shared" else self.memory)[bytes_at]
        values = np.ascontiguousarray(data).view(f"u{size}").reshape(32, count)
        return [np.ascontiguousarray(values[:, i]) for i in range(count)]

    def store(self, space, address, values, size, predicate=None):
        mask = here.mask if predicate is None else here.mask & predicate
        if not mask.any():
            return
        at = np.asarray(address).astype(np.int64)[mask]
        assert (at % (size * len(values)) == 0).all(), "not aligned"
        data = np.stack([np.asarray(x)[mask] for x in values], 1).astype(f"u{size}")
        bytes_at = at[:, None] + np.arange(size * len(values))
        if space == "shared":
            words = (at[:, None] >> 2) + np.arange(max(size * len(values) // 4, 1))
            self._stored(words.reshape(-1), np.repeat(LANES[mask], words.shape[1]))
        (self.shared if space == "shared" else self.memory)[bytes_at] = data.view(np.uint8).reshape(bytes_at.shape)

    def tiles(self, address, transposed):
        """ldmatrix.x4: four words of each lane."""
        at = np.asarray(address).astype(np.int64)
        assert (at % 16 == 0).all(), "not aligned"
        words = (at[:, None] >> 2) + np.arange(4)
        self._loaded(words.reshape(-1), -1)
        rows = np.ascontiguousarray(self.shared[at[:, None] + np.arange(16)]).view(np.uint16).reshape(4, 8, 8).astype(np.uint32)
        if transposed:
            rows = rows.transpose(0, 2, 1)
        r, c = LANES >> 2, 2 * (LANES & 3)
        return [tile[r, c] | tile[r, c + 1] << 16 for tile in rows]

    def put_tiles(self, address, values, transposed):
        """stmatrix.x4."""
        at = np.asarray(address).astype(np.int64)
        assert (at % 16 == 0).all(), "not aligned"
        words = (at[:, None] >> 2) + np.arange(4)
        self._stored(words.reshape(-1), -1)
        tiles, r, c = np.zeros((4, 8, 8), np.uint16), LANES >> 2, 2 * (LANES & 3)
        for tile, value in zip(tiles, values):
            tile[r, c], tile[r, c + 1] = value & 0xFFFF, value >> 16
        if transposed:
            tiles = tiles.transpose(0, 2, 1)
        self.shared[at[:, None] + np.arange(16)] = np.ascontiguousarray(tiles).view(np.uint8).reshape(32, 16)

    # ---- a launch
    def run(self, block, work):
        """work() by all warps of a CTA; raises what one of them raised."""
        errors = []

        def warp(number):
            here.warp, here.mask = number, np.ones(32, bool)
            try:
                with self.turn, np.errstate(all="ignore"):
                    work()
            except BaseException as error:
                if not isinstance(error, threading.BrokenBarrierError):
                    errors.append(error)
                for barrier in (self.everyone, *self.named.values()):
                    barrier.abort()

        self.block = block
        self._join(range(self.warps))
        threads = [threading.Thread(target=warp, args=(w,)) for w in range(self.warps)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]


# ---- PTX ---------------------------------------------------------------------------------------------------------------
def _bits(dtype):
    def convert(x):
        x = np.asarray(x)
        return x if x.dtype == dtype else x.view(dtype) if x.dtype.itemsize == np.dtype(dtype).itemsize else x.astype(dtype)

    return convert


u16, u32, s32, f32, s64 = map(_bits, (np.uint16, np.uint32, np.int32, np.float32, np.int64))
f64 = lambda x: f32(x).astype(np.float64)  # noqa: E731


def _flush(x):
    return np.where(np.abs(x) < 2.0**-126, np.copysign(np.float32(0), x), x).astype(np.float32)


def fragment(words):
    """The A operand m16 of words of each lane."""
    a, r, c = np.zeros((16, 8 * len(words) // 2)), LANES >> 2, 2 * (LANES & 3)
    for i, word in enumerate(words):
        low, high = widened(u32(word))
        a[r + 8 * (i & 1), c + 8 * (i >> 1)], a[r + 8 * (i & 1), c + 1 + 8 * (i >> 1)] = low, high
    return a


def _mma(a, b, c):
    right, k, n = np.zeros((8 * len(b), 8)), 2 * (LANES & 3), LANES >> 2
    for i, word in enumerate(b):
        right[k + 8 * i, n], right[k + 1 + 8 * i, n] = widened(u32(word))
    d = fragment(a) @ right
    return [(f64(c[e]) + d[n + 8 * (e >> 1), k + (e & 1)]).astype(np.float32) for e in range(4)]


class Ptx:
    """Executes the text of an inline assembly on a Machine."""

    SIZES = {"b16": 2, "b32": 4, "f32": 4, "b64": 8, "u32": 4}
    UNARY = {
        "ex2.approx.ftz.f32": np.exp2, "rcp.approx.ftz.f32": lambda x: 1 / x, "rsqrt.approx.ftz.f32": lambda x: 1 / np.sqrt(x),
        "abs.f32": np.abs, "abs.ftz.f32": np.abs, "neg.f32": np.negative, "tanh.approx.f32": np.tanh,
    }  # fmt: skip
    BINARY = {
        "mul.rn.ftz.f32": np.multiply, "add.rn.ftz.f32": np.add, "sub.rn.ftz.f32": np.subtract, "max.ftz.f32": np.fmax,
        "max.NaN.ftz.f32": np.maximum,
    }  # fmt: skip

    def __init__(self):
        self.machine, self.parsed = None, {}

    def parse(self, text):
        """[(predicate or None, opcode, operands)]; an operand: ("reg", name), ("at", name), ("list", names), ("number", n)."""
        text = text.strip()
        if text.startswith("{"):
            text = text[1:].rsplit("}", 1)[0]
        found = []
        for statement in (s.strip() for s in text.split(";")):
            if not statement or statement.startswith(".reg"):
                continue
            predicate, opcode, rest = re.match(r"(?:@(\w+)\s+)?(\S+)\s*(.*)", statement, re.S).groups()
            operands = [self._operand(x.strip()) for x in re.findall(r"\{[^}]*\}|\[[^\]]*\]|[^,\s]+", rest)]
            found.append((predicate, opcode, operands))
        return found

    def _operand(self, x):
        if x.startswith("{"):
            return "list", [y.strip() for y in x[1:-1].split(",")]
        if x.startswith("["):
            return "at", x[1:-1].strip()
        return ("number", int(x, 0)) if re.fullmatch(r"-?(0x)?[0-9a-fA-F]+", x) and x[0] in "-0123456789" else ("reg", x)

    def __call__(self, text, values, letters):
        """Results as arrays of the kinds that the letters before the operands' name."""
        if text.startswith("//"):
            return list(values)
        results = [x[1:] for x in letters if x.startswith("=")]
        r = {f"${len(results) + i}": np.asarray(v) for i, v in enumerate(values)}
        if text not in self.parsed:
            self.parsed[text] = self.parse(text)
        for predicate, opcode, operands in self.parsed[text]:
            self.execute(r, None if predicate is None else r[predicate], opcode, operands)
        kinds = {"r": (s32, Int32), "f": (f32, Float32), "l": (s64, Int64)}
        return [kinds[letter][1](kinds[letter][0](r[f"${i}"])) for i, letter in enumerate(results)]

    def execute(self, r, predicate, opcode, operands):
        m = self.machine
        get = lambda i: r[operands[i][1]] if operands[i][0] in ("reg", "at") else np.full(32, operands[i][1], np.int64)  # noqa: E731
        many = lambda i: [r[x] for x in operands[i][1]] if operands[i][0] == "list" else [get(i)]  # noqa: E731

        def put(i, *xs):
            names = operands[i][1] if operands[i][0] == "list" else [operands[i][1]]
            r.update(zip(names, xs))

        parts = opcode.split(".")
        if opcode in self.UNARY:
            put(0, _flush(f32(self.UNARY[opcode](f32(get(1))))))
        elif opcode in self.BINARY:
            put(0, _flush(self.BINARY[opcode](f32(get(1)), f32(get(2)))))
        elif opcode == "fma.rn.ftz.f32":
            put(0, _flush((f64(get(1)) * f64(get(2)) + f64(get(3))).astype(np.float32)))
        elif opcode == "setp.lt.s32":
            put(0, s32(get(1)) < s32(get(2)))
        elif parts[0] == "selp":
            put(0, np.where(get(3), u32(get(1)), u32(get(2))))
        elif opcode == "mad.wide.s32":
            put(0, s32(get(1)).astype(np.int64) * s32(get(2)) + s64(get(3)))
        elif opcode == "mov.b32" and operands[0][0] == "list":
            put(0, u16(u32(get(1)) & 0xFFFF), u16(u32(get(1)) >> 16))
        elif opcode in ("mov.b32", "mov.u32"):
            special = {"%laneid": LANES, "%tid.x": LANES + 32 * here.warp}
            put(0, special[operands[1][1]].astype(np.int32) if operands[1][1] in special else get(1))
        elif opcode == "shl.b32":
            put(0, u32(get(1)) << u32(get(2)))
        elif opcode == "and.b32":
            put(0, u32(get(1)) & u32(get(2)))
        elif opcode == "cvt.rn.bf16x2.f32":
            put(0, bf16_bits(f32(get(1))) << 16 | bf16_bits(f32(get(2))))
        elif opcode == "cvt.rn.f16x2.f32":
            high, low = (f32(get(i)).astype(np.float16).view(np.uint16).astype(np.uint32) for i in (1, 2))
            put(0, high << 16 | low)
        elif opcode == "cvt.f32.f16":
            put(0, u16(get(1)).view(np.float16).astype(np.float32))
        elif opcode == "cvt.u32.u16":
            put(0, u16(get(1)).astype(np.uint32))
        elif opcode == "cvt.u16.u32":
            put(0, u32(get(1)).astype(np.uint16))
        elif opcode.startswith("shfl.sync.bfly"):
            put(0, u32(get(1))[LANES ^ int(get(2)[0])])
        elif opcode.startswith("movmatrix"):
            tile, row, column = np.zeros((8, 8), np.uint32), LANES >> 2, 2 * (LANES & 3)
            tile[row, column], tile[row, column + 1] = u32(get(1)) & 0xFFFF, u32(get(1)) >> 16
            put(0, tile[column, row] | tile[column + 1, row] << 16)
        elif opcode.startswith("mma.sync") and "bf16.bf16.f32" in opcode:
            put(0, *_mma(many(1), many(2), many(3)))
        elif parts[0] == "ldmatrix":
            put(0, *m.tiles(get(1), "trans" in parts))
        elif parts[0] == "stmatrix":
            m.put_tiles(get(0), [u32(x) for x in many(1)], "trans" in parts)
        elif parts[0] == "ld":
            size = self.SIZES[parts[-1]]
            loaded = m.load(
                "shared" if "shared" in parts else "global",
                get(1),
                size,
                len(operands[0][1]) if operands[0][0] == "list" else 1,
            )
            put(0, *loaded)
        elif parts[0] == "st":
            size = self.SIZES[parts[-1]]
            kind = {2: u16, 4: u32, 8: s64}[size]
            m.store("shared" if "shared" in parts else "global", get(0), [kind(x) for x in many(1)], size, predicate)
        elif opcode.startswith("fence.proxy.async"):
            m.fence()
        elif opcode.startswith("cp.async.bulk.shared"):
            lane = np.flatnonzero(here.mask)
            assert len(lane) == 1, "one lane issues a bulk copy"
            to, source, count, full = (int(np.asarray(get(i))[lane[0]]) for i in range(4))
            assert to % 16 == source % 16 == count % 16 == 0
            m.copy(to, m.memory[source : source + count], full)
        else:
            raise NotImplementedError(opcode)


# ---- the stand-in for the DSL ------------------------------------------------------------------------------------------
ptx = Ptx()


class _Masks(ast.NodeTransformer):
    """Makes `if x: ..` without else and without way out into `for _ in Masked(x): ..`."""

    def visit_If(self, node):
        self.generic_visit(node)
        leaves = (ast.Return, ast.Break, ast.Continue, ast.Raise)
        if node.orelse or any(isinstance(inner, leaves) for inner in ast.walk(node)):
            return node
        call = ast.Call(ast.Name("Masked_", ast.Load()), [_Both().visit(node.test)], [])
        return ast.copy_location(ast.For(ast.Name("_", ast.Store()), call, node.body, [], None), node)

    def visit_IfExp(self, node):
        self.generic_visit(node)
        empty = ast.arguments(posonlyargs=[], args=[], kwonlyargs=[], kw_defaults=[], defaults=[])
        terms = [_Both().visit(node.test), ast.Lambda(empty, node.body), ast.Lambda(empty, node.orelse)]
        return ast.copy_location(ast.Call(ast.Name("chosen_", ast.Load()), terms, []), node)

    def visit_Call(self, node):
        self.generic_visit(node)
        if isinstance(node.func, ast.Attribute) and node.func.attr == "vote_ballot_sync":
            node.args = [_Both().visit(x) for x in node.args]
        return node


class _Both(ast.NodeTransformer):
    """Makes `a and b`, `a or b` into functions of lanes, which evaluate b only where a leaves it open."""

    def visit_BoolOp(self, node):
        self.generic_visit(node)
        name = "both_" if isinstance(node.op, ast.And) else "either_"
        empty = ast.arguments(posonlyargs=[], args=[], kwonlyargs=[], kw_defaults=[], defaults=[])
        return ast.Call(ast.Name(name, ast.Load()), [ast.Lambda(empty, x) for x in node.values], [])


def _flags(x):
    return np.asarray(x).astype(bool) if isinstance(x, Lanes) else np.full(32, bool(x))


def _both(*terms):
    found = np.ones(32, bool)
    for term in terms:
        found = found & _flags(term()) if (found & here.mask).any() else found
    return found.view(Lanes)


def _either(*terms):
    found = np.zeros(32, bool)
    for term in terms:
        found = found if found[here.mask].all() else found | _flags(term())
    return found.view(Lanes)


def _chosen(condition, then, otherwise):
    """`then() if condition else otherwise()`, by lanes where they differ."""
    if not isinstance(condition, Lanes) or len(set(np.asarray(condition).tolist())) == 1:
        return then() if bool(condition) else otherwise()
    return np.where(np.asarray(condition), then(), otherwise()).view(Lanes)


class _Loader(importlib.machinery.SourceFileLoader):
    def get_code(self, name):
        path = self.get_filename(name)
        tree = ast.parse(Path(path).read_text(), path)
        tree = tree if name.endswith(".ptx") else _Masks().visit(tree)
        return compile(ast.fix_missing_locations(tree), path, "exec", dont_inherit=True)

    def exec_module(self, module):
        module.__dict__.update(Masked_=Masked, both_=_both, either_=_either, chosen_=_chosen)
        super().exec_module(module)


class _Finder:
    """Kernel code with masked branches."""

    def find_spec(self, name, path, target=None):
        if not name.startswith("fla_kda_backend.kernels."):
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is not None and isinstance(spec.loader, importlib.machinery.SourceFileLoader):
            spec.loader = _Loader(name, spec.origin)
        return spec


def _inline_asm(kind, values, text, constraints, **_):
    found = ptx(text, values, constraints.split(","))
    return found if isinstance(kind, list) else found[0] if found else None


@contextlib.contextmanager
def _elect_one():
    outer, here.mask = here.mask, here.mask & (LANES == np.flatnonzero(here.mask)[0])
    yield
    here.mask = outer


def install(smem_base=1024):
    """Put the stand-in in the place of cutlass; before any kernel is imported."""
    same = lambda f: f  # noqa: E731
    new = lambda name, **content: sys.modules.setdefault(name, _module(name, content))  # noqa: E731
    current = lambda name: lambda *a, **k: getattr(ptx.machine, name)(*a, **k)  # noqa: E731
    arch = types.SimpleNamespace(
        sync_threads=current("sync_threads"),
        sync_warp=current("sync_warp"),
        barrier=current("barrier"),
        mbarrier_init=lambda at, count: ptx.machine.mbarrier(at.at),
        mbarrier_init_fence=lambda: None,
        mbarrier_wait=lambda at, parity: ptx.machine.wait(at.at, parity),
        mbarrier_arrive_and_expect_tx=lambda at, count: ptx.machine.expect(at.at, count),
        make_warp_uniform=lambda x: Int32(int(x)),
        block_idx=lambda: (Int32(ptx.machine.block[0]), Int32(0), Int32(0)),
        grid_dim=lambda: (Int32(ptx.machine.block[1]), Int32(1), Int32(1)),
        elect_one=_elect_one,
        lane_idx=lambda: Int32(LANES),
        vote_ballot_sync=lambda x: Int32(int(np.packbits(_flags(x), bitorder="little").view(np.uint32)[0])),
        popc=lambda x: Int32(int(x).bit_count() if int(x) >= 0 else (int(x) & 0xFFFFFFFF).bit_count()),
    )
    cute = new(
        "cutlass.cute",
        jit=same,
        kernel=same,
        arch=arch,
        CopyAtom=object,
        Tensor=object,
        make_rmem_tensor=lambda shape, kind: Registers([None] * (shape if isinstance(shape, int) else 64)),
        make_layout=lambda *a, **k: None,
        make_tensor=lambda values, layout: Registers(values) if isinstance(values, list) else values,
        recast_tensor=lambda tensor, kind: tensor,
        recast_ptr=lambda at, layout=None, dtype=None: Pointer(at.at, dtype.width // 8),
        append=lambda *a: None,
    )
    warpgroup = new(
        "cutlass.cute.nvgpu.warpgroup",
        fence=lambda: None,
        commit_group=lambda: None,
        wait_group=current("wait_group"),
        Field=types.SimpleNamespace(ACCUMULATE=0),
        SmemLayoutAtomKind=object,
        make_smem_layout_atom=None,
        OperandSource=types.SimpleNamespace(RMEM=0, SMEM=1),
        MmaF16BF16Op=None,
    )
    new("cutlass.cute.nvgpu", warpgroup=warpgroup, cpasync=None, OperandMajorMode=types.SimpleNamespace(K=0, MN=1))
    new("cutlass.cute.runtime")
    allocator = types.SimpleNamespace(allocate_array=lambda kind, count, byte_alignment: Pointer(smem_base, kind.width // 8))
    new("cutlass.memory", SmemAllocator=lambda: allocator)
    llvm = types.SimpleNamespace(
        inline_asm=_inline_asm,
        extractvalue=lambda kind, raw, at, **_: raw[at[0]],
        StructType=types.SimpleNamespace(get_literal=list),
        AsmDialect=types.SimpleNamespace(AD_ATT=0),
    )
    new("cutlass._mlir")
    new("cutlass._mlir.dialects", llvm=llvm)
    kind = types.SimpleNamespace(i32=lambda: "i32", f32=lambda: "f32", i64=lambda: "i64")
    new("cutlass.cutlass_dsl", T=kind, dsl_user_op=same)
    new(
        "cutlass",
        cute=cute,
        Float32=Float32,
        Int32=Int32,
        Int64=Int64,
        BFloat16=BFloat16,
        Boolean=bool,
        const_expr=same,
        range_constexpr=range,
        range=loop,
        Constexpr=object,
        min=lambda x, y: Int32(np.minimum(x, y)),
        max=lambda x, y: Int32(np.maximum(x, y)),
    )
    sys.meta_path.insert(0, _Finder())
    return cute


def _module(name, content):
    module = types.ModuleType(name)
    module.__dict__.update(content)
    module.__path__ = []
    return module
