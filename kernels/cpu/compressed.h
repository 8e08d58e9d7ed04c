// Weights in bfloat16 held in 12 bits each, without loss, because few rows are bound by reading the weight from memory.
//
// The upper byte of a bfloat16 number is its sign and seven of the eight bits of its exponent. Weights of a panel differ
// little in size: eight values of those seven bits cover nearly all of them. A code of four bits stands for the sign and
// one of the eight; the lower byte is kept as it is. The few weights with other upper bytes are listed, by their place.
// DFloat11 (https://arxiv.org/abs/2504.11651, section 2) observed that exponents carry few bits, and codes them by entropy.
//
// Four units of a panel, (4, columns) pairs of numbers, are three vectors: the lower bytes of the first two units, those of
// the last two, and the codes, of the first two units in the lower halves of the bytes.
// For AVX-512 without AMX: with AVX2, decompressing took longer than reading plain weights; for AMX it was not measured.
#pragma once

#include <algorithm>

#include "linear.h"
#include "vector.h"

#if defined(__AVX512BW__) && !defined(__AMX_TILE__)
#define COMPRESSES

namespace {

constexpr int VECTOR_BYTES = 4 * W;
constexpr int QUAD = 4;           // units that are compressed together
constexpr int QUAD_WORDS = 3 * W;  // 32-bit words of them
constexpr int NUM_CODES = 8;      // without the sign
constexpr int CODES = 2 * NUM_CODES;
constexpr int QUADS_AHEAD = 40;   // to prefetch

// table[code] for codes 0 to 15.
struct UpperBytes {
  __m512i table;
  UpperBytes() = default;
  UpperBytes(const uint8_t* upper) : table(_mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)upper))) {}
  __m512i of(__m512i codes) const { return _mm512_shuffle_epi8(table, _mm512_and_si512(codes, _mm512_set1_epi8(15))); }
};

inline int quads_of(int units) { return (units + QUAD - 1) / QUAD; }

// Words before the first quad of `panel`, which must be even. The quads of a panel and of the next alternate, so both are
// one stream of memory; a weight has an even number of panels.
inline int64_t pair_start(int units, int panel) { return (int64_t)panel * quads_of(units) * QUAD_WORDS; }

// Four units as pairs of bfloat16, except for rare upper bytes.
inline void decompress_quad(const uint32_t* quad, const UpperBytes& upper, Units (&pairs)[QUAD]) {
  for (int line = 0; line < 3; line++) __builtin_prefetch(quad + QUADS_AHEAD * QUAD_WORDS + line * W);
  const __m512i codes = load<__m512i>(quad + 2 * W);
  const __m512i uppers[] = {upper.of(codes), upper.of(_mm512_srli_epi16(codes, 4))};
  for (int i = 0; i < 2; i++) {
    const __m512i lowers = load<__m512i>(quad + i * W);
    pairs[2 * i] = (Units)_mm512_unpacklo_epi8(lowers, uppers[i]);
    pairs[2 * i + 1] = (Units)_mm512_unpackhi_epi8(lowers, uppers[i]);
  }
}

// Iterates over a panel's upper bytes without a code, in ascending order of their places.
class RareBytes {
 public:
  RareBytes(const Product& p, int panel) : next_(p.rare + p.rare_starts[panel]), end_(p.rare + p.rare_starts[panel + 1]) {}
  void skip_to(int unit) { next_ = std::lower_bound(next_, end_, (uint32_t)unit * VECTOR_BYTES << 8); }
  bool any_before(int unit) const { return next_ < end_ && *next_ >> 8 < (uint32_t)unit * VECTOR_BYTES; }
  // Writes those of the units before `unit`. bytes: of units from `from` on.
  void write_before(int unit, int from, uint8_t* bytes) {
    for (; any_before(unit); next_++) bytes[(*next_ >> 8) - (uint32_t)from * VECTOR_BYTES] = (uint8_t)*next_;
  }

 private:
  const uint32_t *next_, *end_;
};

// Decompresses blocks of pairs of panels, quad by quad, for loops that multiply another block meanwhile.
class PairDecoder {
 public:
  const int interval;  // units of a block that are multiplied between two calls of `advance`

  PairDecoder(const Product& p, int interval) : interval(interval), p_(p) {}
  // Begins with units `from`, a multiple of QUAD, to from + units - 1 of `panel`, which is even, and of the next panel.
  // to: (2, panel_size()) units of 32 bits.
  void begin(int panel, int from, int units, uint32_t* to) {
    panel_ = panel;
    from_ = from;
    units_ = units;
    to_ = next_ = to;
    end_ = to + panel_size();
    quad_ = p_.weight + pair_start(p_.units, panel) + (int64_t)from / QUAD * 2 * QUAD_WORDS;
    for (int i = 0; i < 2; i++) upper_[i] = UpperBytes(p_.upper_bytes + (panel + i) * CODES);
  }
  int64_t panel_size() const { return (int64_t)quads_of(units_) * QUAD * W; }
  // Decompresses the next quad of both panels, if one is left.
  void advance() {
    if (next_ == end_) return;
    for (int i = 0; i < 2; i++) {
      Units pairs[QUAD];
      decompress_quad(quad_ + i * QUAD_WORDS, upper_[i], pairs);
      for (int unit = 0; unit < QUAD; unit++) store(next_ + i * (end_ - to_) + unit * W, pairs[unit]);
    }
    quad_ += 2 * QUAD_WORDS;
    next_ += QUAD * W;
  }
  // Decompresses what is left.
  void finish() {
    while (next_ != end_) advance();
    for (int i = 0; i < 2; i++) {
      RareBytes rare(p_, panel_ + i);
      rare.skip_to(from_);
      rare.write_before(from_ + units_, from_, (uint8_t*)(to_ + i * panel_size()));
    }
  }

 private:
  const Product& p_;
  int panel_ = 0, from_ = 0, units_ = 0;
  UpperBytes upper_[2];
  const uint32_t* quad_ = nullptr;
  uint32_t *to_ = nullptr, *next_ = nullptr, *end_ = nullptr;
};

}  // namespace
#endif
