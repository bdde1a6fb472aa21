/* ChaCha20-Poly1305 (RFC 8439) for WASM SIMD: what Noise seals and opens each message with.

   It knows no Noise, and no key or nonce beyond one message's: src/net/cipher.ts puts them into the memory, and the
   message where it is worked on in place. No branch and no address depends on a secret. What lies in the memory after a
   call (a key, a text) lies in the same thread's JavaScript as well, so nothing is wiped. Built by kernel/build.mjs. */
#include <stdint.h>
#include <wasm_simd128.h>

#define EXPORT __attribute__((visibility("default")))

enum { EXTRA_MAX = 64, TEXT_MAX = 65536, TAG = 16, BLOCK = 64, STEP = 4 * BLOCK };

typedef uint32_t __attribute__((aligned(1), may_alias)) loose; /* a word at any address */

EXPORT uint8_t key[32], nonce[12];
/* What is authenticated lies in one piece: the extra data, padded, ends where the text begins; padding and lengths follow
   the text. The last step of ChaCha20 may go beyond that. */
static _Alignas(16) uint8_t room[EXTRA_MAX + TEXT_MAX + 2 * TAG + STEP];
static uint8_t *const text = room + EXTRA_MAX;

static inline uint32_t word(const uint8_t *at) { return *(const loose *)at; }

/* ChaCha20, four blocks at once: lane i of a vector belongs to the i-th. */

#define TURNED_BYTES(a, b0, b1, b2, b3) \
  wasm_i8x16_shuffle(a, a, b0, b1, b2, b3, b0 + 4, b1 + 4, b2 + 4, b3 + 4, b0 + 8, b1 + 8, b2 + 8, b3 + 8, b0 + 12, b1 + 12, \
                     b2 + 12, b3 + 12)
#define TURNED(a, bits) wasm_v128_or(wasm_i32x4_shl(a, bits), wasm_u32x4_shr(a, 32 - (bits)))

#define QUARTER(a, b, c, d) \
  a = wasm_i32x4_add(a, b), d = wasm_v128_xor(d, a), d = TURNED_BYTES(d, 2, 3, 0, 1); \
  c = wasm_i32x4_add(c, d), b = wasm_v128_xor(b, c), b = TURNED(b, 12); \
  a = wasm_i32x4_add(a, b), d = wasm_v128_xor(d, a), d = TURNED_BYTES(d, 3, 0, 1, 2); \
  c = wasm_i32x4_add(c, d), b = wasm_v128_xor(b, c), b = TURNED(b, 7)

/* Lane i of the four becomes the i-th of them. */
static inline void transpose(v128_t *v) {
  v128_t low01 = wasm_i32x4_shuffle(v[0], v[1], 0, 4, 1, 5), high01 = wasm_i32x4_shuffle(v[0], v[1], 2, 6, 3, 7);
  v128_t low23 = wasm_i32x4_shuffle(v[2], v[3], 0, 4, 1, 5), high23 = wasm_i32x4_shuffle(v[2], v[3], 2, 6, 3, 7);
  v[0] = wasm_i64x2_shuffle(low01, low23, 0, 2);
  v[1] = wasm_i64x2_shuffle(low01, low23, 1, 3);
  v[2] = wasm_i64x2_shuffle(high01, high23, 0, 2);
  v[3] = wasm_i64x2_shuffle(high01, high23, 1, 3);
}

/* Adds the key stream from block `counter` on, in whole steps: it may change STEP - 1 bytes behind `size`. */
static void crypt(uint8_t *at, int size, uint32_t counter) {
  v128_t start[16];
  start[0] = wasm_i32x4_splat(0x61707865), start[1] = wasm_i32x4_splat(0x3320646e);
  start[2] = wasm_i32x4_splat(0x79622d32), start[3] = wasm_i32x4_splat(0x6b206574);
  for (int i = 0; i < 8; i++) start[4 + i] = wasm_i32x4_splat(word(key + 4 * i));
  start[12] = wasm_i32x4_add(wasm_i32x4_splat(counter), wasm_i32x4_make(0, 1, 2, 3));
  for (int i = 0; i < 3; i++) start[13 + i] = wasm_i32x4_splat(word(nonce + 4 * i));
  for (; size > 0; size -= STEP, at += STEP) {
    v128_t s[16];
    for (int i = 0; i < 16; i++) s[i] = start[i];
    for (int round = 0; round < 20; round += 2) {
      QUARTER(s[0], s[4], s[8], s[12]);
      QUARTER(s[1], s[5], s[9], s[13]);
      QUARTER(s[2], s[6], s[10], s[14]);
      QUARTER(s[3], s[7], s[11], s[15]);
      QUARTER(s[0], s[5], s[10], s[15]);
      QUARTER(s[1], s[6], s[11], s[12]);
      QUARTER(s[2], s[7], s[8], s[13]);
      QUARTER(s[3], s[4], s[9], s[14]);
    }
    for (int i = 0; i < 16; i++) s[i] = wasm_i32x4_add(s[i], start[i]);
    for (int part = 0; part < 4; part++) {
      transpose(s + 4 * part);
      for (int block = 0; block < 4; block++) {
        uint8_t *to = at + BLOCK * block + 16 * part;
        wasm_v128_store(to, wasm_v128_xor(wasm_v128_load(to), s[4 * part + block]));
      }
    }
    start[12] = wasm_i32x4_add(start[12], wasm_i32x4_splat(4));
  }
}

/* Poly1305: numbers are five limbs of 26 bits, modulo p = 2^130 - 5. Four blocks at once in vectors took twice as long
   in Chromium on x86, which has to shuffle for each of WASM's wide products. */

#define LIMB 0x3ffffff

static inline void split(const uint8_t *at, uint64_t *limbs) {
  for (int i = 0; i < 4; i++) limbs[i] = word(at + 3 * i) >> 2 * i & LIMB;
  limbs[4] = word(at + 12) >> 8;
}

/* Sums below 2^63 to limbs; of them only the second may be a little above 26 bits. */
static inline void carry(const uint64_t *sums, uint64_t *limbs) {
  uint64_t over = 0;
  for (int i = 0; i < 5; i++) {
    over += sums[i];
    limbs[i] = over & LIMB;
    over >>= 26;
  }
  limbs[0] += 5 * over;
  limbs[1] += limbs[0] >> 26;
  limbs[0] &= LIMB;
}

/* The tag of whole blocks. `once` is the key that serves for one message. */
static void authenticate(const uint8_t *once, const uint8_t *at, const uint8_t *end, uint8_t *tag) {
  static const uint32_t CLAMP[5] = {0x3ffffff, 0x3ffff03, 0x3ffc0ff, 0x3f03fff, 0x00fffff};
  uint64_t r[5], r5[5], h[5] = {0};
  split(once, r);
  for (int i = 0; i < 5; i++) r[i] &= CLAMP[i], r5[i] = 5 * r[i];
  for (; at < end; at += TAG) {
    uint64_t block[5], sums[5] = {0};
    split(at, block);
    for (int i = 0; i < 5; i++) h[i] += block[i];
    h[4] += 1 << 24; /* 2^128: each block is whole */
    for (int k = 0; k < 5; k++)
      for (int i = 0; i < 5; i++) sums[k] += h[i] * (i <= k ? r[k - i] : r5[k + 5 - i]);
    carry(sums, h);
  }
  carry(h, h); /* now below 2^130 ... */
  uint64_t less[5], over = 5;
  for (int i = 0; i < 5; i++) {
    over += h[i];
    less[i] = over & LIMB;
    over >>= 26;
  }
  for (int i = 0; i < 5; i++) h[i] = (h[i] & (over - 1)) | (less[i] & -over); /* ... and below p */
  uint64_t words[4] = {h[0] | h[1] << 26, h[1] >> 6 | h[2] << 20, h[2] >> 12 | h[3] << 14, h[3] >> 18 | h[4] << 8};
  uint64_t sum = 0;
  for (int i = 0; i < 4; i++) {
    sum += (uint32_t)words[i] + (uint64_t)word(once + 16 + 4 * i);
    ((loose *)tag)[i] = sum;
    sum >>= 32;
  }
}

/* The two together */

static inline int padded(int size) { return (size + TAG - 1) & -TAG; }

static inline void clear(uint8_t *from, const uint8_t *to) {
  while (from < to) *from++ = 0;
}

/* Of the extra data and the sealed text in the room. */
static void tag_of(int extra_bytes, int text_bytes, uint8_t *tag) {
  uint8_t once[STEP] = {0};
  crypt(once, STEP, 0); /* block 0 of the key stream; the text has those from 1 on */
  uint8_t *extra = text - padded(extra_bytes), *end = text + padded(text_bytes);
  clear(extra + extra_bytes, text);
  clear(text + text_bytes, end);
  loose *lengths = (loose *)end;
  lengths[0] = extra_bytes, lengths[1] = 0, lengths[2] = text_bytes, lengths[3] = 0;
  authenticate(once, extra, end + TAG, tag);
}

EXPORT uint8_t *text_room(void) { return text; }

/* The text becomes the sealed text, with its tag behind it. */
EXPORT void seal(int extra_bytes, int text_bytes) {
  uint8_t tag[TAG];
  crypt(text, text_bytes, 1);
  tag_of(extra_bytes, text_bytes, tag);
  for (int i = 0; i < TAG; i++) text[text_bytes + i] = tag[i];
}

/* Whether the tag behind the sealed text is right; only then it becomes the text. */
EXPORT int unseal(int extra_bytes, int text_bytes) {
  uint8_t given[TAG], tag[TAG], differences = 0;
  for (int i = 0; i < TAG; i++) given[i] = text[text_bytes + i]; /* padding and lengths come to lie there */
  tag_of(extra_bytes, text_bytes, tag);
  for (int i = 0; i < TAG; i++) differences |= given[i] ^ tag[i];
  if (differences) return 0;
  crypt(text, text_bytes, 1);
  return 1;
}
