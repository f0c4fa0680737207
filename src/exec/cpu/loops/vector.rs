//! What the loops need of a vector register, for each instruction set.

#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::*;

/// A register of `LANES` f32.
///
/// # Safety
/// Every `unsafe` method needs a CPU with the instruction set. Those with an address need `LANES`
/// elements there (`lanes` of them for `*_first`), mapped and 4-byte aligned; `stream` needs an
/// address aligned to the register. None moves or touches anything outside.
pub(super) trait Vector: Copy {
    const LANES: usize;
    unsafe fn splat(value: f32) -> Self;
    unsafe fn load(at: *const f32) -> Self;
    /// The first `lanes` elements, the others 0; `lanes <= LANES`.
    unsafe fn load_first(at: *const f32, lanes: usize) -> Self;
    unsafe fn store(self, at: *mut f32);
    /// Only the first `lanes` elements; `lanes <= LANES`.
    unsafe fn store_first(self, at: *mut f32, lanes: usize);
    /// Past the cache, where the instruction set can.
    unsafe fn stream(self, at: *mut f32);
    unsafe fn add(self, other: Self) -> Self;
    /// Fetches the line for one use.
    fn prefetch(at: *const f32);
}

/// The next line for one use: kept out of the outer caches, which is 2 % faster than into them.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
fn prefetch_once(at: *const f32) {
    // SAFETY: SSE is part of every x86-64, and a prefetch faults on no address.
    unsafe { _mm_prefetch::<_MM_HINT_NTA>(at.cast()) }
}

#[cfg(target_arch = "x86_64")]
#[derive(Clone, Copy)]
pub(super) struct Avx512(__m512);

#[cfg(target_arch = "x86_64")]
impl Avx512 {
    #[inline(always)]
    fn mask(lanes: usize) -> __mmask16 {
        ((1u32 << lanes) - 1) as __mmask16
    }
}

#[cfg(target_arch = "x86_64")]
impl Vector for Avx512 {
    const LANES: usize = 16;

    #[inline(always)]
    unsafe fn splat(value: f32) -> Self {
        // SAFETY: the caller has AVX-512F.
        Avx512(unsafe { _mm512_set1_ps(value) })
    }

    #[inline(always)]
    unsafe fn load(at: *const f32) -> Self {
        // SAFETY: passed on to the caller.
        Avx512(unsafe { _mm512_loadu_ps(at) })
    }

    #[inline(always)]
    unsafe fn load_first(at: *const f32, lanes: usize) -> Self {
        // SAFETY: passed on to the caller; masked lanes are not touched.
        Avx512(unsafe { _mm512_maskz_loadu_ps(Self::mask(lanes), at) })
    }

    #[inline(always)]
    unsafe fn store(self, at: *mut f32) {
        // SAFETY: passed on to the caller.
        unsafe { _mm512_storeu_ps(at, self.0) }
    }

    #[inline(always)]
    unsafe fn store_first(self, at: *mut f32, lanes: usize) {
        // SAFETY: passed on to the caller; masked lanes are not touched.
        unsafe { _mm512_mask_storeu_ps(at, Self::mask(lanes), self.0) }
    }

    #[inline(always)]
    unsafe fn stream(self, at: *mut f32) {
        // SAFETY: passed on to the caller.
        unsafe { _mm512_stream_ps(at, self.0) }
    }

    #[inline(always)]
    unsafe fn add(self, other: Self) -> Self {
        // SAFETY: the caller has AVX-512F.
        Avx512(unsafe { _mm512_add_ps(self.0, other.0) })
    }

    #[inline(always)]
    fn prefetch(at: *const f32) {
        prefetch_once(at);
    }
}

#[cfg(target_arch = "x86_64")]
#[derive(Clone, Copy)]
pub(super) struct Avx2(__m256);

#[cfg(target_arch = "x86_64")]
impl Avx2 {
    /// # Safety
    /// The CPU has AVX2; `lanes <= 8`.
    #[inline(always)]
    unsafe fn mask(lanes: usize) -> __m256i {
        static ONES_THEN_ZEROS: [i32; 16] = [-1, -1, -1, -1, -1, -1, -1, -1, 0, 0, 0, 0, 0, 0, 0, 0];
        let at = ONES_THEN_ZEROS.as_ptr().wrapping_add(8 - lanes);
        // SAFETY: 8 numbers from index 8 - lanes are inside the table.
        unsafe { _mm256_loadu_si256(at.cast()) }
    }
}

#[cfg(target_arch = "x86_64")]
impl Vector for Avx2 {
    const LANES: usize = 8;

    #[inline(always)]
    unsafe fn splat(value: f32) -> Self {
        // SAFETY: the caller has AVX2.
        Avx2(unsafe { _mm256_set1_ps(value) })
    }

    #[inline(always)]
    unsafe fn load(at: *const f32) -> Self {
        // SAFETY: passed on to the caller.
        Avx2(unsafe { _mm256_loadu_ps(at) })
    }

    #[inline(always)]
    unsafe fn load_first(at: *const f32, lanes: usize) -> Self {
        // SAFETY: passed on to the caller; masked lanes are not touched.
        Avx2(unsafe { _mm256_maskload_ps(at, Self::mask(lanes)) })
    }

    #[inline(always)]
    unsafe fn store(self, at: *mut f32) {
        // SAFETY: passed on to the caller.
        unsafe { _mm256_storeu_ps(at, self.0) }
    }

    #[inline(always)]
    unsafe fn store_first(self, at: *mut f32, lanes: usize) {
        // SAFETY: passed on to the caller; masked lanes are not touched.
        unsafe { _mm256_maskstore_ps(at, Self::mask(lanes), self.0) }
    }

    #[inline(always)]
    unsafe fn stream(self, at: *mut f32) {
        // SAFETY: passed on to the caller.
        unsafe { _mm256_stream_ps(at, self.0) }
    }

    #[inline(always)]
    unsafe fn add(self, other: Self) -> Self {
        // SAFETY: the caller has AVX2.
        Avx2(unsafe { _mm256_add_ps(self.0, other.0) })
    }

    #[inline(always)]
    fn prefetch(at: *const f32) {
        prefetch_once(at);
    }
}

#[cfg(target_arch = "x86_64")]
#[derive(Clone, Copy)]
pub(super) struct Sse2(__m128);

#[cfg(target_arch = "x86_64")]
impl Vector for Sse2 {
    const LANES: usize = 4;

    #[inline(always)]
    unsafe fn splat(value: f32) -> Self {
        // SAFETY: SSE is part of every x86-64.
        Sse2(unsafe { _mm_set1_ps(value) })
    }

    #[inline(always)]
    unsafe fn load(at: *const f32) -> Self {
        // SAFETY: passed on to the caller.
        Sse2(unsafe { _mm_loadu_ps(at) })
    }

    #[inline(always)]
    unsafe fn load_first(at: *const f32, lanes: usize) -> Self {
        let mut elements = [0.0f32; 4];
        // SAFETY: the caller has `lanes <= 4` elements at `at`.
        unsafe { std::ptr::copy_nonoverlapping(at, elements.as_mut_ptr(), lanes) };
        // SAFETY: four elements are there.
        Sse2(unsafe { _mm_loadu_ps(elements.as_ptr()) })
    }

    #[inline(always)]
    unsafe fn store(self, at: *mut f32) {
        // SAFETY: passed on to the caller.
        unsafe { _mm_storeu_ps(at, self.0) }
    }

    #[inline(always)]
    unsafe fn store_first(self, at: *mut f32, lanes: usize) {
        let mut elements = [0.0f32; 4];
        // SAFETY: four elements are there.
        unsafe { _mm_storeu_ps(elements.as_mut_ptr(), self.0) };
        // SAFETY: the caller has `lanes <= 4` elements at `at`.
        unsafe { std::ptr::copy_nonoverlapping(elements.as_ptr(), at, lanes) };
    }

    #[inline(always)]
    unsafe fn stream(self, at: *mut f32) {
        // SAFETY: passed on to the caller.
        unsafe { _mm_stream_ps(at, self.0) }
    }

    #[inline(always)]
    unsafe fn add(self, other: Self) -> Self {
        // SAFETY: SSE is part of every x86-64.
        Sse2(unsafe { _mm_add_ps(self.0, other.0) })
    }

    #[inline(always)]
    fn prefetch(at: *const f32) {
        prefetch_once(at);
    }
}

/// A line, which the compiler maps to whatever registers there are.
#[derive(Clone, Copy)]
pub(super) struct Portable([f32; 16]);

impl Vector for Portable {
    const LANES: usize = 16;

    #[inline(always)]
    unsafe fn splat(value: f32) -> Self {
        Portable([value; 16])
    }

    #[inline(always)]
    unsafe fn load(at: *const f32) -> Self {
        // SAFETY: passed on to the caller.
        Portable(unsafe { at.cast::<[f32; 16]>().read() })
    }

    #[inline(always)]
    unsafe fn load_first(at: *const f32, lanes: usize) -> Self {
        let mut elements = [0.0f32; 16];
        // SAFETY: the caller has `lanes <= 16` elements at `at`.
        unsafe { std::ptr::copy_nonoverlapping(at, elements.as_mut_ptr(), lanes) };
        Portable(elements)
    }

    #[inline(always)]
    unsafe fn store(self, at: *mut f32) {
        // SAFETY: passed on to the caller.
        unsafe { at.cast::<[f32; 16]>().write(self.0) }
    }

    #[inline(always)]
    unsafe fn store_first(self, at: *mut f32, lanes: usize) {
        // SAFETY: the caller has `lanes <= 16` elements at `at`.
        unsafe { std::ptr::copy_nonoverlapping(self.0.as_ptr(), at, lanes) };
    }

    #[inline(always)]
    unsafe fn stream(self, at: *mut f32) {
        // SAFETY: passed on to the caller.
        unsafe { self.store(at) }
    }

    #[inline(always)]
    unsafe fn add(self, other: Self) -> Self {
        Portable(std::array::from_fn(|i| self.0[i] + other.0[i]))
    }

    #[inline(always)]
    fn prefetch(_at: *const f32) {}
}
