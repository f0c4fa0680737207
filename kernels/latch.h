// Holds a stream until a flag in device memory is set: one thread, and never longer than it was told.
#ifndef TB_PRELUDE
#include "prelude.h"
#endif

// The layout of `gpu::LatchArgs`.
struct LatchArgs {
    u64 flag;      // a u32 in device memory, of this device or a peer's
    u64 released;  // gets the ticks of the release, or 0 if there was none in time
    u64 max_ticks;
    u32 value;     // the flag is set when it has come this far, counting round
    u32 pad;
};
static_assert(sizeof(LatchArgs) == 32, "layout of gpu::LatchArgs");
TB_LAYOUT(LatchArgs, value, 24);

TB_KERNEL(1) tb_latch(LatchArgs args) {
    const u64 start = ticks();
    u64 now = start;
    bool set;
    // No message of an abort reaches a kernel, so the wait is bounded by the device's own clock.
    do {
        set = (int)(load_acquire(args.flag) - args.value) >= 0;
        now = ticks();
    } while (!set && now - start < args.max_ticks);
    *(u64 TB_GLOBAL*)args.released = set ? now : 0;
    system_fence();
}
