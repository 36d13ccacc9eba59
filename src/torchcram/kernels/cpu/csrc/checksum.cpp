// CRC-32 as in zlib, 64 bytes at a time on machines with carry-less multiplication.
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace {

// CRC of each byte, computed once bit by bit.
struct Table {
  uint32_t next[256];
  Table() {
    for (uint32_t byte = 0; byte < 256; ++byte) {
      uint32_t crc = byte;
      for (int bit = 0; bit < 8; ++bit) crc = crc >> 1 ^ (crc & 1 ? 0xedb88320u : 0);
      next[byte] = crc;
    }
  }
};

uint32_t crc_of_bytes(const uint8_t* data, int64_t count, uint32_t crc) {
  static const Table table;
  for (int64_t i = 0; i < count; ++i) crc = crc >> 8 ^ table.next[(crc ^ data[i]) & 255];
  return crc;
}

#if defined(__x86_64__)
#define TORCHCRAM_CLMUL __attribute__((target("pclmul,sse4.1")))

TORCHCRAM_CLMUL inline __m128i load(const uint8_t* data) {
  return _mm_loadu_si128(reinterpret_cast<const __m128i*>(data));
}

// Moves the remainder of 16 bytes to a later block and adds that block.
TORCHCRAM_CLMUL inline __m128i fold(__m128i x, __m128i powers, __m128i next_block) {
  const __m128i low = _mm_clmulepi64_si128(x, powers, 0x00);
  const __m128i high = _mm_clmulepi64_si128(x, powers, 0x11);
  return _mm_xor_si128(_mm_xor_si128(low, high), next_block);
}

// At least 64 bytes, a multiple of 16. The constants are bit-reversed remainders of powers of x.
TORCHCRAM_CLMUL uint32_t crc_of_blocks(const uint8_t* data, int64_t count, uint32_t crc) {
  const __m128i by_64 = _mm_set_epi64x(0x1c6e41596, 0x154442bd4);
  const __m128i by_16 = _mm_set_epi64x(0x0ccaa009e, 0x1751997d0);
  const __m128i words = _mm_setr_epi32(~0, 0, ~0, 0);
  __m128i x[4];
  for (int i = 0; i < 4; ++i) x[i] = load(data + 16 * i);
  x[0] = _mm_xor_si128(x[0], _mm_cvtsi32_si128(int(crc)));
  for (data += 64, count -= 64; count >= 64; data += 64, count -= 64)
    for (int i = 0; i < 4; ++i) x[i] = fold(x[i], by_64, load(data + 16 * i));
  __m128i folded = x[0];
  for (int i = 1; i < 4; ++i) folded = fold(folded, by_16, x[i]);
  for (; count >= 16; data += 16, count -= 16) folded = fold(folded, by_16, load(data));
  // from 128 bits to 64, then to 32 by Barrett reduction
  folded = _mm_xor_si128(_mm_srli_si128(folded, 8), _mm_clmulepi64_si128(folded, by_16, 0x10));
  const __m128i last = _mm_set_epi64x(0, 0x163cd6124);
  const __m128i rest = _mm_srli_si128(folded, 4);
  folded = _mm_xor_si128(_mm_clmulepi64_si128(_mm_and_si128(folded, words), last, 0x00), rest);
  const __m128i divide = _mm_set_epi64x(0x1f7011641, 0x1db710641);
  __m128i times = _mm_clmulepi64_si128(_mm_and_si128(folded, words), divide, 0x10);
  times = _mm_clmulepi64_si128(_mm_and_si128(times, words), divide, 0x00);
  return uint32_t(_mm_extract_epi32(_mm_xor_si128(folded, times), 1));
}
#endif

}  // namespace

// Returns the CRC-32 of all bytes so far; `seen` is the CRC-32 of the earlier ones, 0 if none.
extern "C" __attribute__((visibility("default"))) uint32_t torchcram_crc32(const uint8_t* data,
                                                                           int64_t count,
                                                                           uint32_t seen) {
  uint32_t crc = ~seen;
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (count >= 64 && __builtin_cpu_supports("pclmul") && __builtin_cpu_supports("sse4.1")) {
    const int64_t blocks = count / 16 * 16;
    crc = crc_of_blocks(data, blocks, crc);
    data += blocks, count -= blocks;
  }
#endif
  return ~crc_of_bytes(data, count, crc);
}
