// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
// The trimming switch: a tc program on the egress of each port. A virtual queue says pass, trim or drop; the
// rate limit behind it (htb) is what really delays packets. switch_bpf.py writes the rules and reads the counters.
// clang-format off: <linux/bpf.h> has the types that <bpf/...> needs
#include <linux/bpf.h>
#include <linux/if_ether.h>
#include <linux/in.h>
#include <linux/ip.h>
#include <linux/pkt_cls.h>
#include <linux/udp.h>
#include <stddef.h>
#include <bpf/bpf_core_read.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>
// clang-format on

#define PORTS 256
#define MAX_FRAME_BYTES 1024  // a trimmed frame at most; scenario.py checks it
#define ANY_DSCP 0xff
#define SECOND_PASS 0x7a11c07  // skb->mark of a packet on its way through the same port once more
#define CHECKSUM_PARTIAL 3
#define HEADERS_BYTES (ETH_HLEN + sizeof(struct iphdr) + sizeof(struct udphdr))

// Written by switch_bpf.py (packed_rules), which repeats this layout. Probabilities are fractions of 2**32.
struct rules {
    __u64 ns_per_byte_q10;                 // of the link, times 1024
    __u64 trim_above_bytes;                // backlog from which trimmable packets are trimmed
    __u64 queue_bytes;                     // backlog above which anything is dropped
    __u32 loss;                            // of any IPv4 packet
    __u32 trim;                            // of a trimmable packet, whatever the backlog
    __u32 enter_bad, leave_bad, bad_loss;  // Gilbert-Elliott, per packet
    __u32 trimmed_class;                   // htb class of trimmed packets
    __u16 first_port, last_port;           // UDP destination ports that are trimmable
    __u16 frame_bytes;                     // what is left of a trimmed packet, Ethernet header included
    __u8 trimmable_dscp, trimmed_dscp;
    __u8 fix_lengths;
    __u8 pad[7];
};

// Read by switch_bpf.py, field by field.
struct port {
    struct bpf_spin_lock lock;
    __u32 bad;  // Gilbert-Elliott: in the bad state
    __u64 random;
    __u64 last_ns, backlog_q10;  // backlog in ns of link time, times 1024
    __u64 packets, bytes;        // that left the virtual queue, with the lengths they left with
    __u64 trimmed, trimmed_at_random;
    __u64 dropped_full, dropped_at_random, dropped_in_bursts;
    __u64
        super_packets;  // more than one segment: a link carries them as one, and they count as their segments
    __u64 failed;       // could not be trimmed and was dropped
    __u64 max_backlog_q10;
};

struct {
    __uint(type, BPF_MAP_TYPE_HASH);
    __uint(max_entries, PORTS);
    __type(key, __u32);  // ifindex
    __type(value, struct rules);
} rules SEC(".maps");

struct {
    __uint(type, BPF_MAP_TYPE_HASH);
    __uint(max_entries, PORTS);
    __type(key, __u32);  // ifindex
    __type(value, struct port);
} ports SEC(".maps");

// Not in struct __sk_buff; CO-RE finds where this kernel has it.
struct sk_buff {
    __u8 ip_summed : 2;
} __attribute__((preserve_access_index));
extern void* bpf_cast_to_kern_ctx(void*) __ksym;

static __always_inline __u16 fold(__u64 sum) {
    sum = (sum & 0xffffffff) + (sum >> 32);
    sum = (sum & 0xffffffff) + (sum >> 32);
    sum = (sum & 0xffff) + (sum >> 16);
    sum = (sum & 0xffff) + (sum >> 16);
    sum = (sum & 0xffff) + (sum >> 16);
    return sum;
}

// xorshift64*: seeded per port, so that the same packets in the same order meet the same fates.
static __always_inline __u32 next_random(struct port* port) {
    __u64 x = port->random;
    x ^= x >> 12;
    x ^= x << 25;
    x ^= x >> 27;
    port->random = x;
    return (x * 0x2545f4914f6cdd1dULL) >> 32;
}

// ARP and the queries of the switch itself are neither lost nor counted: that would only test ARP.
static __always_inline int is_traffic(struct __sk_buff* skb) {
    __u8 protocol;
    if (skb->protocol != bpf_htons(ETH_P_IP)) return 0;
    if (bpf_skb_load_bytes(skb, ETH_HLEN + offsetof(struct iphdr, protocol), &protocol, 1)) return 0;
    return protocol != IPPROTO_IGMP;
}

static __always_inline int is_trimmable(struct __sk_buff* skb, const struct rules* rule) {
    struct iphdr ip;
    struct udphdr udp;
    if (skb->len <= rule->frame_bytes || bpf_skb_load_bytes(skb, ETH_HLEN, &ip, sizeof ip)) return 0;
    if (ip.protocol != IPPROTO_UDP || ip.ihl != 5 || (ip.frag_off & bpf_htons(0x3fff))) return 0;
    if (bpf_skb_load_bytes(skb, ETH_HLEN + sizeof ip, &udp, sizeof udp)) return 0;
    __u8 dscp = ip.tos >> 2;
    __u16 to = bpf_ntohs(udp.dest);
    if (dscp == rule->trimmed_dscp || to < rule->first_port || to > rule->last_port) return 0;
    return rule->trimmable_dscp == ANY_DSCP || rule->trimmable_dscp == dscp;
}

static __always_inline void sum_ip_header(struct iphdr* ip) {
    __u64 sum = 0;
    __u16* word = (void*)ip;
    ip->check = 0;
#pragma unroll
    for (int i = 0; i < (int)sizeof(*ip) / 2; i++) sum += word[i];
    ip->check = ~fold(sum);
}

static __always_inline void sum_udp(struct iphdr* ip, struct udphdr* udp, int partial, void* end) {
    __u64 sum = (__u64)ip->saddr + ip->daddr + bpf_htons(IPPROTO_UDP) + udp->len;
    if (partial) {  // whoever finishes it adds the rest to the pseudo-header's sum
        udp->check = fold(sum);
        return;
    }
    sum += (__u64)udp->source + udp->dest + udp->len;
    void* at = udp + 1;
    for (int i = 0; i < MAX_FRAME_BYTES / 4 && at + 4 <= end; i++, at += 4) sum += *(__u32*)at;
    if (at + 2 <= end) {
        sum += *(__u16*)at;
        at += 2;
    }
    if (at + 1 <= end) sum += *(__u8*)at;
    __u16 check = ~fold(sum);
    udp->check = check ? check : 0xffff;
}

static __always_inline int cut(struct __sk_buff* skb, const struct rules* rule) {
    struct sk_buff* kernel = bpf_cast_to_kern_ctx(skb);
    int partial = BPF_CORE_READ_BITFIELD(kernel, ip_summed) == CHECKSUM_PARTIAL;
    __u32 length = rule->frame_bytes;
    if (length < HEADERS_BYTES || length > MAX_FRAME_BYTES) return -1;
    if (bpf_skb_change_tail(skb, length, 0) || bpf_skb_pull_data(skb, length)) return -1;

    void *data = (void*)(long)skb->data, *end = (void*)(long)skb->data_end;
    struct iphdr* ip = data + ETH_HLEN;
    struct udphdr* udp = (void*)(ip + 1);
    if ((void*)(udp + 1) > end) return -1;
    ip->tos = (rule->trimmed_dscp << 2) | (ip->tos & 3);
    if (rule->fix_lengths) ip->tot_len = bpf_htons(length - ETH_HLEN);
    sum_ip_header(ip);  // of its new DSCP in either mode: a router that changes it does as much
    if (!rule->fix_lengths) return 0;
    udp->len = bpf_htons(length - ETH_HLEN - sizeof(*ip));
    if (udp->check) sum_udp(ip, udp, partial, end);  // zero: the sender uses none
    return 0;
}

enum verdict { PASS, TRIM, DROP };

// The virtual queue of one port. No calls: the caller holds the lock.
static __always_inline enum verdict admit(struct port* port, const struct rules* rule, __u64 now_ns,
                                          __u32 length, __u32 segments, int trimmable) {
    if (now_ns > port->last_ns) {
        __u64 drained_q10 = (now_ns - port->last_ns) << 10;
        port->backlog_q10 = port->backlog_q10 > drained_q10 ? port->backlog_q10 - drained_q10 : 0;
        port->last_ns = now_ns;
    }
    if (rule->enter_bad) {
        port->bad = port->bad ? next_random(port) >= rule->leave_bad : next_random(port) < rule->enter_bad;
        if (port->bad && (rule->bad_loss == 0xffffffff || next_random(port) < rule->bad_loss)) {
            port->dropped_in_bursts++;
            return DROP;
        }
    }
    if (rule->loss && next_random(port) < rule->loss) {
        port->dropped_at_random++;
        return DROP;
    }
    int by_chance = trimmable && rule->trim && (rule->trim == 0xffffffff || next_random(port) < rule->trim);
    __u64 full_q10 = length * rule->ns_per_byte_q10;
    int crowded = port->backlog_q10 + full_q10 > rule->trim_above_bytes * rule->ns_per_byte_q10;
    int trimmed = by_chance || (trimmable && crowded);
    __u32 leaves = trimmed ? rule->frame_bytes : length;
    __u64 backlog_q10 = port->backlog_q10 + leaves * rule->ns_per_byte_q10;
    if (backlog_q10 > rule->queue_bytes * rule->ns_per_byte_q10) {
        port->dropped_full++;
        return DROP;
    }
    port->backlog_q10 = backlog_q10;
    if (backlog_q10 > port->max_backlog_q10) port->max_backlog_q10 = backlog_q10;
    port->packets += segments;
    port->bytes += leaves;
    if (!trimmed) return PASS;
    port->trimmed++;
    if (by_chance) port->trimmed_at_random++;
    return TRIM;
}

// A network card lets go of a packet when it has left the host. Here the sender's socket would be charged for it
// until the receiver has it, and one port that is blocked would block the socket for all others. A clone is not charged.
static __always_inline int release(struct __sk_buff* skb) {
    skb->mark = SECOND_PASS;
    if (bpf_clone_redirect(skb, skb->ifindex, 0) >= 0) return TC_ACT_STOLEN;
    skb->mark = 0;  // no memory for a clone
    return TC_ACT_OK;
}

SEC("tc")
int trim(struct __sk_buff* skb) {
    if (skb->mark == SECOND_PASS) {
        skb->mark = 0;
        return TC_ACT_OK;
    }
    __u32 key = skb->ifindex;
    struct rules* rule = bpf_map_lookup_elem(&rules, &key);
    struct port* port = bpf_map_lookup_elem(&ports, &key);
    if (!rule || !port || !is_traffic(skb)) return TC_ACT_OK;

    int trimmable = is_trimmable(skb, rule);
    __u32 segments = skb->gso_segs, length = skb->wire_len;  // each segment has headers of its own
    barrier_var(length);  // the verifier refuses a choice between two fields of skb
    if (segments < 2) {
        segments = 1;
        length = skb->len;
    }
    __u64 now_ns = bpf_ktime_get_ns();
    bpf_spin_lock(&port->lock);
    port->super_packets += segments > 1;
    enum verdict verdict = admit(port, rule, now_ns, length, segments, trimmable);
    bpf_spin_unlock(&port->lock);

    if (verdict == PASS) return release(skb);
    if (verdict == DROP) return TC_ACT_SHOT;
    if (cut(skb, rule)) {
        __sync_fetch_and_add(&port->failed, 1);
        return TC_ACT_SHOT;
    }
    // htb would charge the length from before: it is set ahead of this program. On its way through the same port
    // once more the packet gets the right one; the mark keeps it from being queued twice.
    skb->priority = rule->trimmed_class;
    skb->mark = SECOND_PASS;
    return bpf_redirect(skb->ifindex, 0);
}

char _license[] SEC("license") = "Dual BSD/GPL";
