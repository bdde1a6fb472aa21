/* One expert for WASM SIMD: rows in, outputs out; what model/kernels does on other machines.

   It knows no frames, slices or families: src/model/kernel.ts puts weights and rows into the memory and says where.
   Weights are row-major [out][in], float32 or bfloat16 (kept as such and widened in registers); outputs are float32.
   The same numbers come out on every machine, but for RELAXED, where a machine may fuse multiply and add.

   Shapes: n rows of one expert, D model width, I expert width, both multiples of 8. Built by kernel/build.mjs. */
#include <stdint.h>
#include <wasm_simd128.h>

#define EXPORT __attribute__((visibility("default")))
#define NOINLINE __attribute__((noinline)) /* the file is to be small */
#ifdef RELAXED
#define FMA(a, b, c) __builtin_wasm_relaxed_madd_f32x4(a, b, c)
#else
#define FMA(a, b, c) wasm_f32x4_add(c, wasm_f32x4_mul(a, b))
#endif

enum { F32 = 0, BF16 = 1 };
enum { GLU = 0, CLAMPED = 1, GPT_OSS = 2, NO_GATE = 3 };
enum { SILU = 0, GELU = 1, GELU_TANH = 2, RELU = 3, RELU2 = 4 };

/* As src/model/kernel.ts lays it out; addresses, 0 = there is none. */
struct Expert {
  int32_t kind, form, activation, width, inner;
  float limit, alpha;
  const void *up, *down; /* [2I][D] with the gate's rows first ([I][D] without a gate), [D][I] */
  const float *up_bias, *down_bias;
};

typedef float floats __attribute__((vector_size(16)));
#define EACH(value) ((floats)wasm_f32x4_splat(value))
#define MIN(x, bound) ((floats)wasm_f32x4_pmin(x, bound)) /* of NaN, NaN */
#define MAX(x, bound) ((floats)wasm_f32x4_pmax(x, bound))

static inline float sum_of(v128_t a) {
  return (wasm_f32x4_extract_lane(a, 0) + wasm_f32x4_extract_lane(a, 1)) +
         (wasm_f32x4_extract_lane(a, 2) + wasm_f32x4_extract_lane(a, 3));
}

#define WIDEN_F32 \
  low[j] = wasm_v128_load(weight); \
  high[j] = wasm_v128_load(weight + 4);
/* Interleaved with zeros, the eight halves are eight floats: one instruction for four of them. */
#define WIDEN_BF16 \
  v128_t halves = wasm_v128_load(weight), zeros = wasm_i32x4_splat(0); \
  low[j] = wasm_i16x8_shuffle(zeros, halves, 0, 8, 1, 9, 2, 10, 3, 11); \
  high[j] = wasm_i16x8_shuffle(zeros, halves, 4, 12, 5, 13, 6, 14, 7, 15);

/* R rows times O outputs from output `first` on, 8 inputs a step. */
#define BLOCK(NAME, TYPE, R, O, WIDEN) \
  static void NAME(const TYPE *weights, const float *x, float *y, int in, int out, int first) { \
    v128_t totals[R][O]; \
    for (int r = 0; r < R; r++) \
      for (int j = 0; j < O; j++) totals[r][j] = wasm_f32x4_splat(0); \
    for (int i = 0; i < in; i += 8) { \
      v128_t low[O], high[O]; \
      for (int j = 0; j < O; j++) { \
        const TYPE *weight = weights + (first + j) * in + i; \
        WIDEN \
      } \
      for (int r = 0; r < R; r++) { \
        v128_t x0 = wasm_v128_load(x + r * in + i), x1 = wasm_v128_load(x + r * in + i + 4); \
        for (int j = 0; j < O; j++) { \
          totals[r][j] = FMA(low[j], x0, totals[r][j]); \
          totals[r][j] = FMA(high[j], x1, totals[r][j]); \
        } \
      } \
    } \
    for (int r = 0; r < R; r++) \
      for (int j = 0; j < O; j++) y[r * out + first + j] = sum_of(totals[r][j]); \
  }
BLOCK(f32_4x2, float, 4, 2, WIDEN_F32)
BLOCK(f32_2x4, float, 2, 4, WIDEN_F32)
BLOCK(f32_1x4, float, 1, 4, WIDEN_F32)
BLOCK(bf16_4x2, uint16_t, 4, 2, WIDEN_BF16)
BLOCK(bf16_2x4, uint16_t, 2, 4, WIDEN_BF16)
BLOCK(bf16_1x4, uint16_t, 1, 4, WIDEN_BF16)

/* Outputs outside, rows inside: each weight is read from memory once. */
#define LINEAR(NAME, TYPE, FOUR, TWO, ONE) \
  static void NAME(const TYPE *weights, const float *x, float *y, int n, int in, int out) { \
    for (int first = 0; first < out; first += 4) { \
      int r = 0; \
      for (; r + 4 <= n; r += 4) { \
        FOUR(weights, x + r * in, y + r * out, in, out, first); \
        FOUR(weights, x + r * in, y + r * out, in, out, first + 2); \
      } \
      if (r + 2 <= n) { \
        TWO(weights, x + r * in, y + r * out, in, out, first); \
        r += 2; \
      } \
      if (r < n) ONE(weights, x + r * in, y + r * out, in, out, first); \
    } \
  }
LINEAR(linear_f32, float, f32_4x2, f32_2x4, f32_1x4)
LINEAR(linear_bf16, uint16_t, bf16_4x2, bf16_2x4, bf16_1x4)

static NOINLINE void linear(int kind, const void *weights, const float *bias, const float *x, float *y, int n, int in, int out) {
  if (kind == BF16) linear_bf16(weights, x, y, n, in, out);
  else linear_f32(weights, x, y, n, in, out);
  if (bias)
    for (int r = 0; r < n; r++)
      for (int o = 0; o < out; o++) y[r * out + o] += bias[o];
}

/* Four inner values at a time; NaN stays NaN. 2^k times a polynomial, 2e-7 relative; the constants are Cephes' expf's. */
static NOINLINE floats exp_of(floats x) {
  x = MAX(MIN(x, EACH(88.f)), EACH(-87.f));
  floats k = wasm_f32x4_floor(x * 1.44269504f + .5f), r = (x - k * .693359375f) + k * 2.12194440e-4f;
  floats p = EACH(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  v128_t scale = wasm_i32x4_shl(wasm_i32x4_add(wasm_i32x4_trunc_sat_f32x4(k), wasm_i32x4_splat(127)), 23);
  return (p * r * r + r + 1.f) * (floats)scale;
}

static inline floats sigmoid(floats x) { return 1.f / (1.f + exp_of(-x)); }

/* Abramowitz and Stegun 7.1.26: 1.5e-7 absolute. */
static floats erf_of(floats x) {
  floats size = wasm_f32x4_abs(x), t = 1.f / (1.f + .3275911f * size);
  floats p = ((((1.061405429f * t - 1.453152027f) * t + 1.421413741f) * t - .284496736f) * t + .254829592f) * t;
  return wasm_v128_bitselect(x, 1.f - p * exp_of(-size * size), wasm_i32x4_splat(1 << 31));
}

static NOINLINE floats activated(int activation, floats x) {
  switch (activation) {
    case SILU: return x * sigmoid(x);
    case GELU: return .5f * x * (1.f + erf_of(x * .70710678f));
    case GELU_TANH: return x * sigmoid(1.59576912f * (x + .044715f * x * x * x)); /* 1 + tanh z = 2 sigmoid 2z */
    case RELU: return MAX(EACH(0.f), x);
    default: return MAX(EACH(0.f), x * wasm_f32x4_abs(x));
  }
}

static floats gated(const struct Expert *e, floats gate, floats up) {
  if (e->form == GLU) return activated(e->activation, gate) * up;
  gate = MIN(gate, EACH(e->limit));
  up = MAX(MIN(up, EACH(e->limit)), EACH(-e->limit));
  if (e->form == CLAMPED) return activated(e->activation, gate) * up;
  return (up + 1.f) * gate * sigmoid(e->alpha * gate);
}

/* In place: row r of [n][I] never overtakes row r of [n][2I]. */
static void gate_rows(const struct Expert *e, float *hidden, int n) {
  int inner = e->inner;
  for (int r = 0; r < n; r++) {
    const float *gate = hidden + r * (e->form == NO_GATE ? inner : 2 * inner), *up = gate + inner;
    float *to = hidden + r * inner;
    for (int i = 0; i < inner; i += 4) {
      floats g = wasm_v128_load(gate + i);
      wasm_v128_store(to + i, e->form == NO_GATE ? activated(e->activation, g) : gated(e, g, wasm_v128_load(up + i)));
    }
  }
}

/* y[n][D] = the expert's outputs for x[n][D]; `hidden` has room for n * 2 I floats. */
EXPORT void expert_outputs(const struct Expert *e, const float *x, float *y, float *hidden, int n) {
  int width = e->width, hidden_width = e->form == NO_GATE ? e->inner : 2 * e->inner;
  linear(e->kind, e->up, e->up_bias, x, hidden, n, width, hidden_width);
  gate_rows(e, hidden, n);
  linear(e->kind, e->down, e->down_bias, hidden, y, n, e->inner, width);
}
