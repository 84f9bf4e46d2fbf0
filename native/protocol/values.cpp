#include "protocol/values.hpp"

#include "protocol/elided_values.hpp"
#include "protocol/planes_values.hpp"
#include "protocol/raw_values.hpp"

namespace tailcut {

OpContext::OpContext(const Shape& shape, wire::Codec codec, std::vector<codec::PacketLimits> limits,
                     Memory& memory, bool elided)
    : shape(shape),
      codec(codec),
      limits(std::move(limits)),
      memory(memory),
      elided(elided),
      silent(shape.ranks) {
    gather_limits = this->limits[shape.self];
    for (std::size_t peer = 0; peer < this->limits.size(); ++peer)
        if (peer != shape.self) gather_limits.lower_to(this->limits[peer]);
}

std::size_t owned_floats(wire::Codec codec, const Layout& layout) {
    return codec == wire::Codec::kPlanes ? PlanesReduction::floats(layout) : RawReduction::floats(layout);
}

std::unique_ptr<Contributions> make_contributions(OpContext& context, Seq seq, const Layout& layout,
                                                  const Coding& coding, std::span<const float> bucket,
                                                  std::span<const float> weights) {
    if (context.elided && context.codec == wire::Codec::kPlanes)
        return std::make_unique<ElidedPlanesContributions>(context, seq, layout, coding);
    if (context.elided)
        return std::make_unique<ElidedRawContributions>(context, seq, layout, bucket, weights);
    if (context.codec == wire::Codec::kPlanes)
        return std::make_unique<PlanesContributions>(context, seq, layout, coding, bucket);
    return std::make_unique<RawContributions>(context, seq, layout, bucket, weights);
}

std::unique_ptr<Reduction> make_reduction(OpContext& context, Seq seq, const Layout& layout,
                                          const Coding& gather, Block memory) {
    if (context.elided && context.codec == wire::Codec::kPlanes)
        return std::make_unique<ElidedPlanesReduction>(context, seq, layout, gather, std::move(memory));
    if (context.elided) return std::make_unique<ElidedRawReduction>(context, seq, layout, std::move(memory));
    if (context.codec == wire::Codec::kPlanes)
        return std::make_unique<PlanesReduction>(context, seq, layout, gather, std::move(memory));
    return std::make_unique<RawReduction>(context, seq, layout, std::move(memory));
}

std::unique_ptr<Means> make_means(OpContext& context, Seq seq, const Layout& layout, Block memory) {
    if (context.elided) return std::make_unique<ElidedMeans>(layout, std::move(memory));
    if (context.codec == wire::Codec::kPlanes)
        return std::make_unique<PlanesMeans>(context, seq, layout, std::move(memory));
    return std::make_unique<RawMeans>(layout, std::move(memory));
}

}  // namespace tailcut
