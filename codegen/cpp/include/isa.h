// The only place that knows the machine: a native vector of floats and the few operations that C++ vector
// extensions do not spell. Everything above works on 16 lanes, made of 16 / LANES native vectors.
#pragma once
#include <cstdint>
#include <cstring>
#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace octavo {

#if defined(__AVX512F__)
constexpr int LANES = 16;
#elif defined(__AVX2__)
constexpr int LANES = 8;
#else
constexpr int LANES = 4;
#endif

typedef float nf __attribute__((vector_size(4 * LANES)));
typedef double nd __attribute__((vector_size(4 * LANES)));
typedef int32_t ni __attribute__((vector_size(4 * LANES)));
typedef int64_t nl __attribute__((vector_size(4 * LANES)));
typedef float half_f __attribute__((vector_size(2 * LANES)));
typedef uint16_t half_u16 __attribute__((vector_size(2 * LANES)));
typedef uint32_t nu __attribute__((vector_size(4 * LANES)));

#define INLINE inline __attribute__((always_inline))
#define KERNEL inline __attribute__((noinline))  // forward() calls hundreds: inlined, they take minutes to compile

INLINE nf native_splat(float x) { return x - nf{}; }

// Fused where the level has it; a product and a sum, each rounded, where it has not (x86-64 baseline).
INLINE nf native_fma(nf a, nf b, nf c) {
#if defined(__AVX512F__)
  return (nf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__) && defined(__AVX2__)
  return (nf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
  return (nf)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
  return a * b + c;
#endif
}

INLINE nd native_fma(nd a, nd b, nd c) {
#if defined(__AVX512F__)
  return (nd)_mm512_fmadd_pd((__m512d)a, (__m512d)b, (__m512d)c);
#elif defined(__FMA__) && defined(__AVX2__)
  return (nd)_mm256_fmadd_pd((__m256d)a, (__m256d)b, (__m256d)c);
#elif defined(__aarch64__)
  return (nd)vfmaq_f64((float64x2_t)c, (float64x2_t)a, (float64x2_t)b);
#else
  return a * b + c;
#endif
}

// a > b ? a : b, lane by lane.
INLINE nf native_larger(nf a, nf b) {
#if defined(__AVX512F__)
  return (nf)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__)
  return (nf)_mm256_max_ps((__m256)a, (__m256)b);
#elif defined(__SSE2__)
  return (nf)_mm_max_ps((__m128)a, (__m128)b);
#else
  return a > b ? a : b;
#endif
}

INLINE nf native_sqrt(nf a) {
#if defined(__AVX512F__)
  return (nf)_mm512_sqrt_ps((__m512)a);
#elif defined(__AVX2__)
  return (nf)_mm256_sqrt_ps((__m256)a);
#elif defined(__aarch64__)
  return (nf)vsqrtq_f32((float32x4_t)a);
#else
  return (nf)_mm_sqrt_ps((__m128)a);
#endif
}

// The floating-point environment of a step: round to nearest, denormals kept, whatever the calling thread had.
class FloatState {
 public:
#if defined(__x86_64__)
  FloatState() : saved_(_mm_getcsr()) { _mm_setcsr(0x1F80); }
  ~FloatState() { _mm_setcsr(saved_); }

 private:
  unsigned saved_;
#elif defined(__aarch64__)
  FloatState() {
    __asm__ volatile("mrs %0, fpcr" : "=r"(saved_));
    __asm__ volatile("msr fpcr, %0" : : "r"(uint64_t(0)));
  }
  ~FloatState() { __asm__ volatile("msr fpcr, %0" : : "r"(saved_)); }

 private:
  uint64_t saved_;
#endif
};

INLINE void pause() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  __asm__ volatile("yield");
#endif
}

}  // namespace octavo
