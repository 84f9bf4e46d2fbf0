// Sums of squares from which the error of a mean follows (docs/budget.md), over one op at one rank. Squares of raw and of
// elided values are not looked at: there a contribution counts as 1 a coordinate, and the mean of m of them as 1/m.
#pragma once

#include <cstddef>

#include "protocol/reports/fields.hpp"

namespace tailcut {

struct Energies {
    // SCATTER, at the owner: over its shard.
    double contributed = 0;  // a contribution: the mean of those that came
    double sampled = 0;      // the same, over how many came
    double mean = 0;         // their mean, its error included
    // Error of the mean by the planes that were sent, as of Gaussian blocks whose errors are independent by rank,
    double quantized = 0;
    double trimmed = 0;    // and by those that were cut off on the way
    double planes = 0;     // those that were sent, times `contributed`: for their mean
    double void_mean = 0;  // what the mean would be where nobody delivered
    double coords = 0,
           void_coords = 0;  // planes: of blocks with a mean, and of those of which nobody delivered any
    // SCATTER, at the sender: error of its contributions, and what it were if their blocks were Gaussian.
    double sent_noise = 0, sent_nominal = 0;
    // GATHER, at the owner: error by the planes of the mean.
    double mean_quantized = 0;
    // GATHER, at the receiver: the means of the other owners, and the errors by what was cut off and what did not come.
    double received = 0, received_trimmed = 0, received_lost = 0;
    double received_coords = 0, unseen_coords = 0;  // planes: of blocks of which something came, and nothing

    template <typename Visit>
    static constexpr void visit_fields(Visit&& visit) {
        visit("contributed", &Energies::contributed);
        visit("sampled", &Energies::sampled);
        visit("mean", &Energies::mean);
        visit("quantized", &Energies::quantized);
        visit("trimmed", &Energies::trimmed);
        visit("planes", &Energies::planes);
        visit("void_mean", &Energies::void_mean);
        visit("coords", &Energies::coords);
        visit("void_coords", &Energies::void_coords);
        visit("sent_noise", &Energies::sent_noise);
        visit("sent_nominal", &Energies::sent_nominal);
        visit("mean_quantized", &Energies::mean_quantized);
        visit("received", &Energies::received);
        visit("received_trimmed", &Energies::received_trimmed);
        visit("received_lost", &Energies::received_lost);
        visit("received_coords", &Energies::received_coords);
        visit("unseen_coords", &Energies::unseen_coords);
    }
};
static_assert(listed_bytes<Energies>() == sizeof(Energies));

// Of coordinates to which so many of the ranks have contributed, not looked at: independent, and as large as each other.
inline Energies nominal_energies(double coords, std::size_t contributions, std::size_t ranks) {
    Energies energies;
    energies.contributed = coords;
    energies.sampled = coords / static_cast<double>(contributions > 0 ? contributions : ranks);
    (contributions > 0 ? energies.mean : energies.void_mean) = energies.sampled;
    return energies;
}

}  // namespace tailcut
