"""How the ranks of a group find each other: cards in a store, first datagrams, who hears whose multicast."""
