#include "protocol/reports/record.hpp"

#include <algorithm>
#include <array>
#include <bit>
#include <concepts>
#include <cstring>
#include <string_view>
#include <type_traits>

namespace tailcut {
namespace {

// Not written: what means nothing after the op, what only policies read, and what follows from the rest.
constexpr std::array<std::string_view, 5> kLeftOut{"ticket", "ended_at", "delivered_bytes", "in_flight_s",
                                                   "scatter_cap_s"};

bool written(std::string_view name) {
    for (const std::string_view other : kLeftOut)
        if (name == other) return false;
    return true;
}

template <Listed T>
const std::vector<char>& written_fields() {
    static const std::vector<char> kWritten = [] {
        std::vector<char> fields;
        T::visit_fields([&](const char* name, auto) { fields.push_back(written(name)); });
        return fields;
    }();
    return kWritten;
}

template <typename T>
constexpr bool kIsVector = false;
template <typename T>
constexpr bool kIsVector<std::vector<T>> = true;
template <typename T>
constexpr bool kIsOptional = false;
template <typename T>
constexpr bool kIsOptional<std::optional<T>> = true;

template <typename T>
bool same(const T& a, const T& b) {
    if constexpr (Listed<T>) {
        bool equal = true;
        T::visit_fields([&](const char*, auto field) { equal = equal && same(a.*field, b.*field); });
        return equal;
    } else if constexpr (kIsVector<T>) {
        return a.empty() && b.empty();
    } else {
        return a == b;
    }
}

// All fields zero, false, none or empty, whatever the struct begins with.
template <Listed T>
const T& zero() {
    static const T kZero = [] {
        T value{};
        T::visit_fields([&](const char*, auto field) {
            using Value = std::remove_cvref_t<decltype(value.*field)>;
            if constexpr (Listed<Value>)
                value.*field = zero<Value>();
            else
                value.*field = Value{};
        });
        return value;
    }();
    return kZero;
}

std::uint64_t zigzag(std::int64_t value) {
    return static_cast<std::uint64_t>(value) << 1 ^ static_cast<std::uint64_t>(value >> 63);
}

std::int64_t microseconds(Duration value) {
    return value >= 0 ? value / kMicrosecond : -((-value + kMicrosecond - 1) / kMicrosecond);
}

class Writer {
public:
    explicit Writer(std::size_t expected_bytes) { bytes_.reserve(expected_bytes); }

    void number(std::uint64_t value) {
        for (; value >= 0x80; value >>= 7) byte(static_cast<std::uint8_t>(value | 0x80));
        byte(static_cast<std::uint8_t>(value));
    }
    void signed_number(std::int64_t value) { number(zigzag(value)); }
    void time(Duration value) { signed_number(microseconds(value)); }
    void real(float value) {
        const auto bits = std::bit_cast<std::uint32_t>(value);
        for (int k = 0; k < 4; ++k) byte(static_cast<std::uint8_t>(bits >> (8 * k)));
    }
    void whole(std::uint64_t value) {
        for (int k = 0; k < 8; ++k) byte(static_cast<std::uint8_t>(value >> (8 * k)));
    }

    // Fields that differ from `base` have a bit each, and their values follow.
    template <Listed T>
    void fields(const T& value, const T& base) {
        const auto& in_record = written_fields<T>();
        const std::size_t at = bytes_.size();
        bytes_.resize(at + (static_cast<std::size_t>(std::ranges::count(in_record, true)) + 7) / 8);
        std::size_t field_index = 0, index = 0;
        T::visit_fields([&](const char*, auto field) {
            if (!in_record[field_index++]) return;
            if (!same(value.*field, base.*field)) {
                bytes_[at + index / 8] |= std::byte(1 << index % 8);
                put(value.*field, base.*field);
            }
            ++index;
        });
    }

    // Lengths of runs, in turns granules that are in the set and that are not. `first` says which come first; if the
    // rest is all of one kind, it is not written.
    void runs(const GranuleSet& set, std::uint32_t granules, bool first) {
        std::vector<std::uint32_t> lengths;
        bool in = first;
        for (std::uint32_t g = 0, end; g < granules; g = end, in = !in) {
            end = set.test(g) == in ? set.run_end(g, granules) : g;
            if (end < granules) lengths.push_back(end - g);
        }
        number(lengths.size());
        for (const std::uint32_t length : lengths) number(length);
    }

    std::vector<std::byte> take() { return std::move(bytes_); }

private:
    void byte(std::uint8_t value) { bytes_.push_back(std::byte(value)); }

    template <typename T>
    void put(const T& value, const T& base) {
        if constexpr (Listed<T>) {
            fields(value, base);
        } else if constexpr (kIsVector<T>) {
            number(value.size());
            if constexpr (Listed<typename T::value_type>) {
                const auto* before = &zero<typename T::value_type>();
                for (const auto& entry : value) {  // what is as in the entry before is not repeated
                    fields(entry, *before);
                    before = &entry;
                }
            } else {
                for (const auto& entry : value) number(entry ? *entry + 1u : 0u);
            }
        } else if constexpr (std::same_as<T, SinceEntry>) {
            number(value ? zigzag(microseconds(*value)) + 1 : 0);
        } else if constexpr (kIsOptional<T>) {
            number(value ? std::uint64_t{*value} + 1 : 0);
        } else if constexpr (std::same_as<T, bool>) {
            // the bit says it
        } else if constexpr (std::is_enum_v<T>) {
            number(static_cast<std::uint64_t>(value));
        } else if constexpr (std::is_floating_point_v<T>) {
            real(static_cast<float>(value));
        } else if constexpr (std::is_signed_v<T>) {
            if constexpr (sizeof(T) == sizeof(Duration))
                time(value);
            else
                signed_number(value);
        } else {
            number(value);
        }
    }

    std::vector<std::byte> bytes_;
};

void put_cuts(Writer& writer, const OpReport& report) {
    // Neighbours that came alike are one entry.
    std::vector<std::pair<Cut, std::uint32_t>> alike;
    for (const Cut& cut : report.cuts) {
        if (!alike.empty()) {
            auto& [before, times] = alike.back();
            if (before.seq == cut.seq && before.stage == cut.stage && before.from == cut.from &&
                before.granules == cut.granules && before.payload_bytes == cut.payload_bytes &&
                before.late == cut.late && before.first + times * before.granules == cut.first) {
                ++times;
                continue;
            }
        }
        alike.emplace_back(cut, 1);
    }
    writer.number(alike.size());
    for (const auto& [cut, times] : alike) {
        writer.number(report.seq - cut.seq);
        writer.number(std::uint64_t{cut.from} << 2 | std::uint64_t{cut.late} << 1 |
                      (cut.stage == wire::Stage::kGather));
        for (const std::uint32_t value : {cut.first, cut.granules, cut.payload_bytes, times})
            writer.number(value);
    }
}

void put_uses(Writer& writer, const OpReport& report) {
    writer.number(report.uses.size());
    for (const LateUse& use : report.uses) {
        writer.signed_number(std::int64_t{use.user} - report.seq);
        writer.number(use.user - use.seq);
        writer.number(std::uint64_t{use.from} << 2 | std::uint64_t{use.subtracted} << 1 |
                      (use.stage == wire::Stage::kGather));
        writer.number(use.first);
        writer.number(use.last - use.first);
    }
}

// One share, and the shards where it stood in for something.
void put_stand_ins(Writer& writer, const OpReport& report) {
    std::vector<std::size_t> shards;
    for (std::size_t shard = 0; shard < report.stand_ins.size(); ++shard)
        if (report.stand_ins[shard] > 0 && !report.answered[shard].all(0, report.granules[shard]))
            shards.push_back(shard);
    writer.number(shards.size());
    if (!shards.empty()) writer.real(report.stand_ins[shards.front()]);
    for (const std::size_t shard : shards) writer.number(shard);
}

void put_fates(Writer& writer, const OpReport& report) {
    writer.number(report.granules.size());
    std::uint32_t before = 0;
    for (const std::uint32_t granules : report.granules) {
        writer.signed_number(std::int64_t{granules} - before);
        before = granules;
    }
    if (report.granules.empty()) return;
    for (const GranuleSet& set : report.contributions)
        writer.runs(set, report.granules[report.own_shard], true);
    for (std::size_t shard = 0; shard < report.granules.size(); ++shard) {
        writer.runs(report.answered[shard], report.granules[shard], true);
        GranuleSet empty = report.answered[shard];
        empty.remove(report.held[shard]);
        writer.runs(empty, report.granules[shard], false);
    }
    put_cuts(writer, report);
    put_uses(writer, report);
    put_stand_ins(writer, report);
    writer.whole(report.mean_hash);
}

// ---- the schema -------------------------------------------------------------------------------------------

template <typename T>
std::string kind_of();

template <Listed T>
std::string schema_of(const char* name) {
    std::string fields;
    T::visit_fields([&](const char* field, auto member) {
        if (!written(field)) return;
        using Value = std::remove_cvref_t<decltype(std::declval<T&>().*member)>;
        fields +=
            (fields.empty() ? "[\"" : ", [\"") + std::string(field) + "\", \"" + kind_of<Value>() + "\"]";
    });
    return std::string("\"") + name + "\": [" + fields + "]";
}

template <typename T>
std::string kind_of() {
    if constexpr (std::same_as<T, OpReport>)
        return "OpReport";
    else if constexpr (std::same_as<T, StageReport>)
        return "StageReport";
    else if constexpr (std::same_as<T, LinkReport>)
        return "LinkReport";
    else if constexpr (std::same_as<T, LinkStage>)
        return "LinkStage";
    else if constexpr (std::same_as<T, Traffic>)
        return "Traffic";
    else if constexpr (std::same_as<T, Energies>)
        return "Energies";
    else if constexpr (std::same_as<T, LateCompletion>)
        return "LateCompletion";
    else if constexpr (std::same_as<T, LrScale>)
        return "LrScale";
    else if constexpr (std::same_as<T, Bounds>)
        return "Bounds";
    else if constexpr (std::same_as<T, Coding>)
        return "Coding";
    else if constexpr (std::same_as<T, CoordRun>)
        return "CoordRun";
    else if constexpr (std::same_as<T, SinceEntry>)
        return "time or none";
    else if constexpr (kIsOptional<T>)
        return "number or none";
    else if constexpr (kIsVector<T>)
        return "list of " + kind_of<typename T::value_type>();
    else if constexpr (std::same_as<T, bool>)
        return "flag";
    else if constexpr (std::same_as<T, Status>)
        return "complete|partial|void|behind|length_mismatch|closed|seq_exhausted|failed";
    else if constexpr (std::same_as<T, Ending>)
        return "all|grace|absent|bound|deadline";
    else if constexpr (std::same_as<T, wire::Stage>)
        return "scatter|gather";
    else if constexpr (std::is_floating_point_v<T>)
        return "float";
    else if constexpr (std::is_signed_v<T>)
        return sizeof(T) == sizeof(Duration) ? "time" : "signed";
    else
        return "number";
}

}  // namespace

std::vector<std::byte> record_of(const OpReport& report) {
    Writer writer(512);  // bytes, which most records do not exceed
    writer.time(report.ended_at - report.entered_at);
    writer.fields(report, zero<OpReport>());
    writer.fields(report.terms, zero<Terms>());
    put_fates(writer, report);
    return writer.take();
}

std::string record_schema() {
    return "{" + schema_of<OpReport>("OpReport") + ", " + schema_of<StageReport>("StageReport") + ", " +
           schema_of<LinkReport>("LinkReport") + ", " + schema_of<LinkStage>("LinkStage") + ", " +
           schema_of<Traffic>("Traffic") + ", " + schema_of<Energies>("Energies") + ", " +
           schema_of<LateCompletion>("LateCompletion") + ", " + schema_of<LrScale>("LrScale") + ", " +
           schema_of<Terms>("Terms") + ", " + schema_of<Bounds>("Bounds") + ", " +
           schema_of<Coding>("Coding") + ", " + schema_of<CoordRun>("CoordRun") + "}";
}

}  // namespace tailcut
