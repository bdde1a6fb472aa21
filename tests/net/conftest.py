from net_helpers import open_hosts as open_hosts
