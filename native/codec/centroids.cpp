#include "codec/centroids.hpp"

#include <cmath>
#include <memory>

namespace tailcut::codec {
namespace {

constexpr std::size_t kPieces = 1u << kTableBits;

// e^-a for a >= 0.
double falling_exp(double a) {
    constexpr double kLn2 = 0.6931471805599453;
    const auto halvings = static_cast<int>(a / kLn2);
    const double r = a - halvings * kLn2;
    double sum = 1, term = 1;
    for (int k = 1; k < 24; ++k) {
        term *= -r / k;
        sum += term;
    }
    return std::ldexp(sum, -halvings);  // a power of two: exact
}

double density(double x) { return 0.3989422804014327 * falling_exp(x * x / 2); }

// 1 - Φ(x) for x >= 0: a series near zero, a continued fraction in the tail.
double tail(double x) {
    if (x < 3) {
        double sum = x, term = x;
        for (int k = 3; k < 140; k += 2) {
            term *= x * x / k;
            sum += term;
        }
        return 0.5 - density(x) * sum;
    }
    double fraction = x;
    for (int k = 120; k > 0; --k) fraction = x + k / fraction;
    return density(x) / fraction;
}

// The x with tail(x) = p, from a start with tail(start) >= p: Newton's method on a convex function.
double tail_inverse(double p, double start) {
    double x = start;
    for (int k = 0; k < 12; ++k) x += (tail(x) - p) / density(x);
    return x;
}

std::unique_ptr<const Centroids> build() {
    // Edges of the 12-bit cells on the positive side; the last edge is infinity.
    std::array<double, kPieces + 1> edge{}, above{}, height{};
    for (std::size_t k = 0; k < kPieces; ++k) {
        edge[k] = k == 0 ? 0 : tail_inverse(0.5 - k / (2.0 * kPieces), edge[k - 1]);
        above[k] = tail(kSpread * edge[k]);
        height[k] = density(kSpread * edge[k]);
    }
    auto made = std::make_unique<Centroids>();
    made->means[0] = 0;
    for (int bits = 1; bits <= kTableBits; ++bits) {
        const std::size_t cells = std::size_t{1} << (bits - 1), step = kPieces / cells;
        for (std::size_t m = 0; m < cells; ++m) {
            const std::size_t a = m * step, e = a + step;
            made->means[cells + m] = static_cast<float>((height[a] - height[e]) / (above[a] - above[e]));
        }
    }
    // The last piece has no end: its chord is drawn so that the chord's middle is the piece's median.
    const double middle = tail_inverse(0.25 / kPieces, edge[kPieces - 1]);
    edge[kPieces] = 2 * middle - edge[kPieces - 1];
    for (std::size_t k = 0; k < kPieces; ++k)
        made->pieces[k] = {static_cast<float>(kSpread * edge[k]),
                           static_cast<float>(kSpread * (edge[k + 1] - edge[k]))};
    return made;
}

}  // namespace

const Centroids& centroids() {
    static const std::unique_ptr<const Centroids> made = build();
    return *made;
}

}  // namespace tailcut::codec
