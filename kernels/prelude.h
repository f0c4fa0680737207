// What the kernels need of a device compiler: the same names for NVRTC, hipRTC and plain clang (AMD),
// without a header of CUDA or HIP.
#ifndef TB_PRELUDE
#define TB_PRELUDE

typedef unsigned int u32;
typedef unsigned long long u64;

// Addresses arrive as integers in the argument structs.
static_assert(sizeof(u32) == 4 && sizeof(u64) == 8 && sizeof(void*) == 8, "64-bit devices only");

// Where a field lies for the host, in the struct of the same name in `gpu`.
#if defined(__CUDACC__)
// NVRTC up to 13.0 has nothing that gives an offset as a constant: the size alone is checked there,
// the offsets by clang and hipRTC.
#define TB_LAYOUT(type, member, offset) static_assert(true, "")
#else
#define TB_LAYOUT(type, member, offset) \
    static_assert(__builtin_offsetof(type, member) == offset, "layout of gpu::" #type "::" #member)
#endif

#if defined(__CUDACC__)

#define TB_DEVICE static __device__ __forceinline__
#define TB_KERNEL(threads) extern "C" __global__ void __launch_bounds__(threads)
#define TB_SHARED __shared__
// Address spaces are found by the compiler.
#define TB_GLOBAL
#define TB_LOCAL

typedef float float1_t;
typedef float2 float2_t;
typedef float4 float4_t;

TB_DEVICE u32 thread_index() { return threadIdx.x; }
TB_DEVICE u32 block_index() { return blockIdx.x; }
TB_DEVICE u32 block_threads() { return blockDim.x; }
TB_DEVICE u64 grid_threads() { return (u64)gridDim.x * blockDim.x; }
TB_DEVICE u32 lanes() { return 32; }

TB_DEVICE void block_barrier() { __syncthreads(); }
TB_DEVICE void warp_barrier() { __syncwarp(); }
TB_DEVICE void system_fence() { __threadfence_system(); }
// Membar of every warp: a fence of thread 0 alone is not documented to wait for stores that other
// warps have in flight.
TB_DEVICE void drain_stores() { __threadfence_system(); }

// Nanoseconds since the epoch of the device.
TB_DEVICE u64 ticks() {
    u64 now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now)::"memory");
    return now;
}

TB_DEVICE u32 load_acquire(u64 address) {
    u32 value;
    asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
    return value;
}

TB_DEVICE void atomic_add(u64 address, u64 value) { atomicAdd((u64*)address, value); }
TB_DEVICE void atomic_min(u64 address, u64 value) { atomicMin((u64*)address, value); }
TB_DEVICE u32 atomic_exchange(u64 address, u32 value) { return atomicExch((u32*)address, value); }

// NVIDIA devices are not divided.
TB_DEVICE u32 xcc_id() { return 0; }

// Volatile: kept in the order written, so that all loads of a step stand before its stores. `.cs` is
// evict-first, the nearest that NVIDIA has to a non-temporal access.
template <bool STREAM> TB_DEVICE void load(u64 address, float1_t& v) {
    if (STREAM) asm volatile("ld.global.cs.f32 %0, [%1];" : "=f"(v) : "l"(address));
    else asm volatile("ld.global.f32 %0, [%1];" : "=f"(v) : "l"(address));
}
template <bool STREAM> TB_DEVICE void load(u64 address, float2_t& v) {
    if (STREAM) asm volatile("ld.global.cs.v2.f32 {%0,%1}, [%2];" : "=f"(v.x), "=f"(v.y) : "l"(address));
    else asm volatile("ld.global.v2.f32 {%0,%1}, [%2];" : "=f"(v.x), "=f"(v.y) : "l"(address));
}
template <bool STREAM> TB_DEVICE void load(u64 address, float4_t& v) {
    if (STREAM)
        asm volatile("ld.global.cs.v4.f32 {%0,%1,%2,%3}, [%4];"
                     : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "l"(address));
    else
        asm volatile("ld.global.v4.f32 {%0,%1,%2,%3}, [%4];"
                     : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "l"(address));
}

template <bool STREAM> TB_DEVICE void store(u64 address, float1_t v) {
    if (STREAM) asm volatile("st.global.cs.f32 [%0], %1;" ::"l"(address), "f"(v));
    else asm volatile("st.global.f32 [%0], %1;" ::"l"(address), "f"(v));
}
template <bool STREAM> TB_DEVICE void store(u64 address, float2_t v) {
    if (STREAM) asm volatile("st.global.cs.v2.f32 [%0], {%1,%2};" ::"l"(address), "f"(v.x), "f"(v.y));
    else asm volatile("st.global.v2.f32 [%0], {%1,%2};" ::"l"(address), "f"(v.x), "f"(v.y));
}
template <bool STREAM> TB_DEVICE void store(u64 address, float4_t v) {
    if (STREAM)
        asm volatile("st.global.cs.v4.f32 [%0], {%1,%2,%3,%4};" ::"l"(address), "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w));
    else
        asm volatile("st.global.v4.f32 [%0], {%1,%2,%3,%4};" ::"l"(address), "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w));
}

TB_DEVICE void add(float1_t& a, float1_t b) { a += b; }
TB_DEVICE void add(float2_t& a, float2_t b) { a.x += b.x, a.y += b.y; }
TB_DEVICE void add(float4_t& a, float4_t b) { a.x += b.x, a.y += b.y, a.z += b.z, a.w += b.w; }

TB_DEVICE void splat(float1_t& v, float f) { v = f; }
TB_DEVICE void splat(float2_t& v, float f) { v.x = v.y = f; }
TB_DEVICE void splat(float4_t& v, float f) { v.x = v.y = v.z = v.w = f; }

TB_DEVICE u32 bits(float f) { return __float_as_uint(f); }
TB_DEVICE u32 fold(float1_t v) { return bits(v); }
TB_DEVICE u32 fold(float2_t v) { return bits(v.x) ^ bits(v.y); }
TB_DEVICE u32 fold(float4_t v) { return bits(v.x) ^ bits(v.y) ^ bits(v.z) ^ bits(v.w); }

#else // AMD, by hipRTC or by plain clang with `-x hip`

#define TB_DEVICE static inline __attribute__((device, always_inline))
#define TB_KERNEL(threads) \
    extern "C" __attribute__((global)) __attribute__((amdgpu_flat_work_group_size(1, threads))) void
#define TB_SHARED __attribute__((shared))
// Pointers into global and into shared memory, so that no `flat` instructions are made.
#define TB_GLOBAL __attribute__((address_space(1)))
#define TB_LOCAL __attribute__((address_space(3)))

typedef float float1_t;
typedef float float2_t __attribute__((ext_vector_type(2)));
typedef float float4_t __attribute__((ext_vector_type(4)));

TB_DEVICE u32 thread_index() { return __builtin_amdgcn_workitem_id_x(); }
TB_DEVICE u32 block_index() { return __builtin_amdgcn_workgroup_id_x(); }
TB_DEVICE u32 block_threads() { return __builtin_amdgcn_workgroup_size_x(); }
TB_DEVICE u64 grid_threads() { return __builtin_amdgcn_grid_size_x(); }

// The macro came first and went first.
#if __has_builtin(__builtin_amdgcn_wavefrontsize)
TB_DEVICE u32 lanes() { return __builtin_amdgcn_wavefrontsize(); }
#else
TB_DEVICE u32 lanes() { return __AMDGCN_WAVEFRONT_SIZE; }
#endif

TB_DEVICE void block_barrier() {
    __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup");
    __builtin_amdgcn_s_barrier();
    __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup");
}
// A wavefront runs in lockstep: only the compiler has to keep the order.
TB_DEVICE void warp_barrier() {
    __builtin_amdgcn_fence(__ATOMIC_RELEASE, "wavefront");
    __builtin_amdgcn_wave_barrier();
    __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "wavefront");
}
TB_DEVICE void system_fence() { __builtin_amdgcn_fence(__ATOMIC_SEQ_CST, ""); }
// A wavefront waits for its own stores only, so each has to; thread 0 alone then writes back the cache
// that all of them share.
TB_DEVICE void drain_stores() { __builtin_amdgcn_fence(__ATOMIC_RELEASE, "agent"); }

// The counter of constant rate.
TB_DEVICE u64 ticks() {
#if __has_builtin(__builtin_readsteadycounter)
    u64 now = __builtin_readsteadycounter();
#elif defined(__GFX11__) || defined(__GFX12__)
    u64 now = __builtin_amdgcn_s_sendmsg_rtnl(0x83); // MSG_RTN_GET_REALTIME
#else
    u64 now = __builtin_amdgcn_s_memrealtime();
#endif
    asm volatile("" ::: "memory");
    return now;
}

TB_DEVICE u32 load_acquire(u64 address) {
    return __hip_atomic_load((u32 TB_GLOBAL*)address, __ATOMIC_ACQUIRE, __HIP_MEMORY_SCOPE_SYSTEM);
}

TB_DEVICE void atomic_add(u64 address, u64 value) {
    __hip_atomic_fetch_add((u64 TB_GLOBAL*)address, value, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
}
TB_DEVICE void atomic_min(u64 address, u64 value) {
    __hip_atomic_fetch_min((u64 TB_GLOBAL*)address, value, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
}

TB_DEVICE u32 atomic_exchange(u64 address, u32 value) {
    return __hip_atomic_exchange((u32 TB_GLOBAL*)address, value, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
}

// The die that a wavefront runs on, where a device may have several and tells.
TB_DEVICE u32 xcc_id() {
#if defined(__gfx940__) || defined(__gfx941__) || defined(__gfx942__) || defined(__gfx950__)
    u32 id;
    asm volatile("s_getreg_b32 %0, hwreg(HW_REG_XCC_ID, 0, 4)" : "=s"(id));
    return id;
#else
    return 0;
#endif
}

template <bool STREAM, typename T> TB_DEVICE void load(u64 address, T& v) {
    const T TB_GLOBAL* from = (const T TB_GLOBAL*)address;
    if (STREAM) v = __builtin_nontemporal_load(from);
    else v = *from;
}
template <bool STREAM, typename T> TB_DEVICE void store(u64 address, T v) {
    T TB_GLOBAL* into = (T TB_GLOBAL*)address;
    if (STREAM) __builtin_nontemporal_store(v, into);
    else *into = v;
}

template <typename T> TB_DEVICE void add(T& a, T b) { a += b; }
template <typename T> TB_DEVICE void splat(T& v, float f) { v = f; }

TB_DEVICE u32 bits(float f) { return __builtin_bit_cast(u32, f); }
TB_DEVICE u32 fold(float1_t v) { return bits(v); }
TB_DEVICE u32 fold(float2_t v) { return bits(v.x) ^ bits(v.y); }
TB_DEVICE u32 fold(float4_t v) { return bits(v.x) ^ bits(v.y) ^ bits(v.z) ^ bits(v.w); }

#endif

// The vector of a number of floats.
template <int FLOATS> struct Word;
template <> struct Word<1> { typedef float1_t type; };
template <> struct Word<2> { typedef float2_t type; };
template <> struct Word<4> { typedef float4_t type; };

#endif
