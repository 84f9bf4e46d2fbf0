// Sums of squares from which the error of a mean follows (docs/budget.md), over one op at one rank. Raw and
// elided values are not squared: there a contribution counts as 1 per coordinate, and the mean of m
// contributions as 1/m.
#pragma once

#include <cstddef>

#include "protocol/reports/fields.hpp"

namespace tailcut {

struct Energies {
    // SCATTER, at the owner, over its shard.
    double contributed = 0;  // energy of a contribution: the mean over those that came
    double sampled = 0;      // the same, divided by how many came
    double mean = 0;         // energy of their mean, including its error
    // Error of the mean caused by the planes that were sent, for Gaussian blocks with errors that are
    // independent by rank.
    double quantized = 0;
    double trimmed = 0;    // error of the mean caused by planes that were trimmed
    double planes = 0;     // planes that were sent, weighted with `contributed`, to compute their average
    double void_mean = 0;  // what the energy of the mean would be where nobody delivered
    // planes: coordinates of blocks with a mean, and of blocks that nobody delivered any part of.
    double coords = 0, void_coords = 0;
    // SCATTER, at the sender: error of its contributions, and what it would be if their blocks were Gaussian.
    double sent_noise = 0, sent_nominal = 0;
    // GATHER, at the owner: error caused by the planes of the mean, and how much of it the next op brings back.
    double mean_quantized = 0, mean_carried = 0;
    // GATHER, at the receiver: energy of the other owners' means, and the errors caused by trimming and by
    // loss.
    double received = 0, received_trimmed = 0, received_lost = 0;
    // planes: coordinates of blocks that came at least in part, and of those that did not come at all.
    double received_coords = 0, unseen_coords = 0;

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
        visit("mean_carried", &Energies::mean_carried);
        visit("received", &Energies::received);
        visit("received_trimmed", &Energies::received_trimmed);
        visit("received_lost", &Energies::received_lost);
        visit("received_coords", &Energies::received_coords);
        visit("unseen_coords", &Energies::unseen_coords);
    }
};
static_assert(listed_bytes<Energies>() == sizeof(Energies));

// Energies of coordinates to which `contributions` of the ranks contributed. The values are not read: they
// count as independent and equally large.
inline Energies nominal_energies(double coords, std::size_t contributions, std::size_t ranks) {
    Energies energies;
    energies.contributed = coords;
    energies.sampled = coords / static_cast<double>(contributions > 0 ? contributions : ranks);
    (contributions > 0 ? energies.mean : energies.void_mean) = energies.sampled;
    return energies;
}

}  // namespace tailcut
